# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Asynchronous GRPO on torchtitan.

    torchrun --nproc_per_node=2 -m torchtitan.grpo_train --job.config_file X.toml

Rank 0 takes groups of rollouts from the rollout process, plans the step and scatters the
rows; all ranks compute the loss and step the optimizer; the new weights leave for the
servers in the background while the next step runs.
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.grpo.system.device import lower_timeouts, settle_device

if __name__ == "__main__":
    # Until StopRequest takes over there is nothing to end in order, and a Ctrl-C during the
    # imports needs no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

settle_device()

import msgspec
import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.train import Trainer

from torchtitan.grpo.checkpoint import check_resumable, save_whole
from torchtitan.grpo.controller import RolloutController
from torchtitan.grpo.data.feed import Feed, Signal, TrainBatch
from torchtitan.grpo.data.plan import epoch_order
from torchtitan.grpo.data.replay import ReplaySource
from torchtitan.grpo.entry import leave, run
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.losses.objective import SUM_NAMES, metrics_from_sums
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.models.hf_weights import export_hf, load_hf_weights
from torchtitan.grpo.models.spec import build_policy_runner, build_reference, register_hf_model
from torchtitan.grpo.observe.clock import StepClock
from torchtitan.grpo.observe.metrics import GRPOMetricsProcessor
from torchtitan.grpo.observe.report import draw_reward_curve, summarise, write_summary
from torchtitan.grpo.policy_probe import PolicyProbe
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.training.gradient_parts import GradientParts
from torchtitan.grpo.training.step import MinibatchLoss, ScoredRows, score
from torchtitan.grpo.types import PromptProgress
from torchtitan.grpo.weight_sync.build import attested_tokens, build_publisher
from torchtitan.grpo.weight_sync.publisher import PublisherFailed, WeightPublisher
from torchtitan.grpo.weight_sync.unpublished import Unpublished


@dataclass(frozen=True)
class _Learned:
    """What came of a batch on this rank.

    Attributes:
        batch: The batch; of one in parts the last one, with the counts of all of them.
        sums: [len(SUM_NAMES)] float64.
        grad_norms: Of each optimizer step.
    """

    batch: TrainBatch
    sums: torch.Tensor
    grad_norms: list[float]


class GRPOTrainer(Trainer):
    """Torchtitan's Trainer, learning from rollouts.

    Construction, layouts, optimizer, scheduler and checkpoints are upstream's.

    Args:
        job_config: The checked configuration.
        hf_model: What is trained.
        stop: Set by SIGINT and SIGTERM.
    """

    metrics_processor: GRPOMetricsProcessor
    publisher: WeightPublisher | Unpublished

    def __init__(self, job_config: JobConfig, hf_model: HFModel, stop: StopRequest) -> None:
        self.config, self.hf_model, self.stop = job_config, hf_model, stop
        self.begin = time.perf_counter()
        self.progress = PromptProgress()
        self.stopped = False
        register_hf_model(hf_model, job_config)
        super().__init__(job_config)
        self.is_rank_zero = dist.get_rank() == 0
        self.runner = build_policy_runner(self)
        self.reference = build_reference(self) if job_config.grpo.kl_coef > 0 else None
        if self.reference is not None:
            self.checkpointer.states.update(self.reference.checkpoint_state())
        adapter = self.train_spec.state_dict_adapter
        assert adapter is not None
        self.sd_adapter = adapter(self.model_args, str(hf_model.path))
        self.clock = StepClock()
        self.controller: RolloutController | ReplaySource | None = None
        self.feed = self._build_feed()

    def _build_feed(self) -> Feed:
        self.num_batch_ranks, self.batch_rank = 1, 0
        if self.parallel_dims.dp_enabled:
            mesh = self.parallel_dims.get_mesh("batch")
            self.num_batch_ranks, self.batch_rank = mesh.size(), mesh.get_local_rank()
        # Of the ranks that share rows and see the output, one counts in sums over ranks.
        twins = [self.parallel_dims.get_optional_mesh(name) for name in ("tp", "cp")]
        self.is_counted = self.runner.has_output and not any(
            mesh.get_local_rank() for mesh in twins if mesh is not None
        )
        # The other ranks wait while rank 0 waits for servers, rollouts and evaluations.
        patience_seconds = (
            120
            + self.config.inference.startup_timeout_seconds
            + 2 * self.config.rollout.batch_timeout_seconds
            + 2 * self.config.weight_sync.timeout_seconds
        )
        fetch_seconds = self.config.rollout.batch_timeout_seconds
        return Feed(self.batch_rank, self.config.training.seq_len, patience_seconds, fetch_seconds)

    # -- the run -----------------------------------------------------------------------

    def train(self) -> None:
        """The whole run: start, steps, end."""
        self._load_weights()
        self.first_step = self.step
        self._start()
        with self._profilers() as profilers:
            while not self.stopped and self.should_continue_training():
                batch = self._next_batch()
                if batch is None:
                    break
                self.gc_handler.run(self.step + 1)
                if not self._train_step(batch):
                    break
                self._after_step()
                for profiler in profilers:
                    profiler.step()
        self._finish()

    def _load_weights(self) -> None:
        """From the newest checkpoint, or else from the Hugging Face directory."""
        check_resumable(self.checkpointer, self.config.checkpoint.load_step)
        if not self.checkpointer.load(step=self.config.checkpoint.load_step):
            load_hf_weights(self.model_parts, self.sd_adapter, self.hf_model.path)

    def _start(self) -> None:
        """Starts rollouts, and serves the trainer's own weights before anything else."""
        self._rank_zero_first(self._start_rollouts)
        if self.stopped:
            return
        self.publisher = self._build_publisher()
        self.probe = self._build_probe()
        self.metrics_processor.start(self.step)
        self._publish(self._reserve_slot())
        if self.controller is not None:
            with self._failing_others():
                self._wait_for_push(self.step)
                self._evaluate()
        logger.info(f"Training starts at step {self.step + 1}")
        self.clock.restart()

    def _build_publisher(self) -> WeightPublisher | Unpublished:
        if self.config.rollout.replay is not None:
            return Unpublished()
        return build_publisher(
            self.config,
            self.model_parts,
            self.sd_adapter,
            self.device,
            self.controller.link if self.controller else None,
            self.controller.servers if self.controller else [],
            self.hf_model.vocab_size,
        )

    def _build_probe(self) -> PolicyProbe:
        tokens = attested_tokens(self.config, self.hf_model.vocab_size)
        num_rows, row_len = self.config.training.local_batch_size, self.config.training.seq_len
        if not (self.parallel_dims.pp_enabled or self.config.compile.enable):
            # Pipelines and compiled models have one shape; others need no more than this.
            divisor = self.parallel_dims.seq_len_divisor
            num_rows, row_len = 1, -(-len(tokens) // divisor) * divisor
        return PolicyProbe(
            self.runner,
            self.model_parts,
            self.feed,
            tokens,
            num_rows=num_rows,
            row_len=row_len,
            device=self.device,
            speaks=self.is_counted and self.batch_rank == 0,
        )

    def _reserve_slot(self) -> int:
        return self.publisher.reserve_slot() if self.is_rank_zero else 0

    def _start_rollouts(self) -> None:
        source = ReplaySource if self.config.rollout.replay is not None else RolloutController
        # Kept before it is started: what it has started by then must be closed.
        self.controller = controller = source(
            self.config,
            self.hf_model,
            start_version=self.step,
            progress=self.progress,
            should_stop=self._should_stop,
        )
        if isinstance(controller, RolloutController) and self.config.inference.urls_file:
            self.stop.on_hangup(controller.link.reread_urls)
        controller.start()

    def _should_stop(self) -> bool:
        """Whether a wait for rollouts is in vain: asked to stop, or nothing is pushed any more."""
        has_failed = hasattr(self, "publisher") and self.publisher.failure is not None
        return self.stop.requested or has_failed

    def _next_batch(self) -> TrainBatch | None:
        """This rank's share of the next step, or of the next part of it.

        None when the run is to end.
        """
        with self.clock.measure("wait_data"):
            if self.controller is None:
                self.publisher.raise_if_failed()
                received = self.feed.receive()
                self.stopped = received is Signal.STOP
                return received if isinstance(received, TrainBatch) else None
            with self._failing_others():
                self.publisher.raise_if_failed()
                step = self.controller.next_step(self.step, self.num_batch_ranks)
                self.publisher.raise_if_failed()
            if step is None or self.stop.requested:
                self.stopped = not self.controller.is_exhausted
                self.feed.send_signal(Signal.STOP if self.stopped else Signal.END)
                return None
            self.rollout_metrics = step.metrics
            return self.feed.send_step(
                step.plan,
                self._reserve_slot() if step.is_last else 0,
                self.controller.progress,
                self.controller.share(self.step),
                is_first=step.is_first,
                is_last=step.is_last,
            )

    def _train_step(self, batch: TrainBatch) -> bool:
        """One step; False where the run is to end before all parts of it have come."""
        learning_rate = float(self.lr_schedulers.schedulers[0].get_last_lr()[0])
        is_streamed = self.config.rollout.stream
        learned = self._learn_in_parts(batch) if is_streamed else self._learn(batch)
        if learned is None:
            return False
        self.step += 1
        self.lr_schedulers.step()
        if self.reference is not None:
            self.reference.follow(self.model_parts)
        with self.clock.measure("boundary_stall"):
            self._publish(learned.batch.publish_slot)
            if not self.config.grpo.async_weight_update:
                self._rank_zero_first(lambda: self._wait_for_push(self.step))
        self.ntokens_seen += learned.batch.num_tokens
        self.progress = learned.batch.progress
        self._log_step(learned, learning_rate)
        return True

    def _learn(self, batch: TrainBatch) -> _Learned:
        """The optimizer steps of a batch that is whole."""
        config = self.config.grpo
        minibatches = self._score(batch)
        learned = _Learned(batch, torch.zeros(len(SUM_NAMES), dtype=torch.float64), [])
        for epoch in range(config.num_epochs):
            for index in epoch_order(config.num_minibatches, epoch):
                # Nothing to learn from is no reason to move, as momentum would.
                if batch.minibatch_tokens[index]:
                    grad_norm = self._update(minibatches[index], learned.sums)
                    learned.grad_norms.append(grad_norm)
        return learned

    def _learn_in_parts(self, part: TrainBatch | None) -> _Learned | None:
        """The optimizer step of a batch whose first part is there; see :class:`GradientParts`.

        None where the run is to end before the last one.
        """
        gradient = GradientParts()
        while part is not None:
            if part.is_first:  # once more where the rollout process was killed amid the batch
                self.optimizers.zero_grad()
                gradient = GradientParts()
            share = gradient.share_of(part)
            if share:
                (rows,) = self._score(part)
                self._add_gradient(rows, gradient.sums, share)
            if part.is_last:
                return self._finish_parts(gradient)
            part = self._next_batch()
        # A checkpoint that is written now has nothing to do with half a gradient.
        self.optimizers.zero_grad()
        return None

    def _finish_parts(self, gradient: GradientParts) -> _Learned:
        if gradient.is_empty:
            return _Learned(gradient.whole(), gradient.sums, [])
        gradient.finish(p for part in self.model_parts for p in part.parameters())
        return _Learned(gradient.whole(), gradient.sums, [self._apply_gradient()])

    def _score(self, batch: TrainBatch) -> list[ScoredRows]:
        return score(
            batch, self.runner, self.reference, self.config.grpo, self.device, self.feed,
            is_counted=self.is_counted,
        )  # fmt: skip

    def _publish(self, slot: int) -> None:
        """Hands the weights of now to the background; rates the probe with them when due."""
        self.publisher.publish(self.step, slot)
        if self.publisher.is_attested(self.step):
            self.publisher.probes.put(self.step, self.probe.logprobs())

    def _update(self, minibatch: ScoredRows, sums: torch.Tensor) -> float:
        """One optimizer step; adds to this rank's sums, and returns the gradient norm."""
        self.optimizers.zero_grad()
        self._add_gradient(minibatch, sums)
        return self._apply_gradient()

    def _add_gradient(self, minibatch: ScoredRows, sums: torch.Tensor, share: float = 1.0) -> None:
        loss = MinibatchLoss(minibatch, self.config.grpo, share)
        self.runner.forward_backward(minibatch.rows, loss)
        if self.is_counted:
            sums += loss.sums()

    def _apply_gradient(self) -> float:
        """Clips and steps; returns the gradient norm."""
        grad_norm = dist_utils.clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        self.checkpointer.maybe_wait_for_staging()
        with self.clock.measure("boundary_stall"), self.clock.measure("fence"):
            self.publisher.fence()
        self.optimizers.step()
        return float(grad_norm)

    def _after_step(self) -> None:
        """Checkpoint, export and evaluation, when due."""
        if self.step == self.first_step + 1:
            meshes = self.parallel_dims.get_all_one_dimensional_meshes().values()
            groups = [mesh.get_group() for mesh in meshes]
            lower_timeouts(groups, self.config.comm.train_timeout_seconds)
        is_last = self.step == self.config.training.steps
        self._save(is_last)
        interval = self.config.grpo.hf_export_interval
        if interval and self.step % interval == 0 and not is_last:
            self._export(self.step)
        interval = self.config.evaluation.interval
        if interval and self.step % interval == 0 and not is_last and self.controller:
            with self._failing_others():
                self._evaluate()
            self.clock.restart()

    def _save(self, is_last: bool) -> None:
        """A checkpoint when due, and what is in flight with it."""
        self.checkpointer.save(self.step, last_step=is_last)
        checkpoint = self.config.checkpoint
        if checkpoint.enable and self.step % checkpoint.interval == 0 and self.controller:
            with self._failing_others():
                self.controller.save(self.step)

    def _finish(self) -> None:
        """The model exported, the last version served and evaluated, the run summed up."""
        if self.stopped:
            self._save_stopped()
        else:
            self._conclude()
        if hasattr(self, "publisher"):
            # While the others still do what it asks of them.
            self._rank_zero_first(self.publisher.close)

    def _conclude(self) -> None:
        if self.first_step < self.step < self.config.training.steps:
            # A replayed file came to its end; a longer one may be gone on with.
            save_whole(self.checkpointer, self.step)
        # First what was learned: a server that does not come round must not cost it.
        folder = self._export(self.step)
        self._rank_zero_first(lambda: self._settle(folder))

    def _settle(self, hf_checkpoint: Path) -> None:
        self._wait_for_push(self.step)
        self._evaluate()
        self.publisher.raise_if_failed()
        if not self.stop.requested:
            self._report(hf_checkpoint)

    def _save_stopped(self) -> None:
        """A stopped run keeps where it is, in a checkpoint that it can be resumed from."""
        checkpoint = self.config.checkpoint
        message = f"Stopped at step {self.step}"
        if checkpoint.enable and self.step > self.first_step:
            save_whole(self.checkpointer, self.step)
            message += ", which is checkpointed"
        logger.info(f"{message}.")

    # -- parts -------------------------------------------------------------------------

    @contextmanager
    def _profilers(self) -> Iterator[list[Any]]:
        """Upstream's profilers, those of them that ``[profiling]`` enables."""
        settings = {
            "global_step": self.step,
            "base_folder": self.config.job.dump_folder,
        }
        with (
            maybe_enable_profiling(self.config.profiling, **settings) as trace,
            maybe_enable_memory_snapshot(self.config.profiling, **settings) as snapshot,
        ):
            yield [profiler for profiler in (trace, snapshot) if profiler is not None]

    def _rank_zero_first(self, work: Callable[[], None]) -> None:
        """Rank 0 works while the others wait for its word: go on, or stop.

        Each rank may hear of a signal at another moment, so rank 0 alone decides.
        """
        if not self.is_rank_zero:
            self.stopped = self.feed.receive() is Signal.STOP
            return
        with self._failing_others():
            work()
        self.stopped = self.stop.requested
        self.feed.send_signal(Signal.STOP if self.stopped else Signal.READY)

    @contextmanager
    def _failing_others(self) -> Iterator[None]:
        """Around what rank 0 does alone: lets the waiting ranks go when it fails.

        Only where the others' next word with rank 0 is ``feed.receive()``: any other
        collective would not match the signal, and hang.
        """
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # the others may be gone already
                self.feed.send_signal(Signal.FAIL)
            if isinstance(error, PublisherFailed) and isinstance(
                self.controller, RolloutController
            ):
                # It ends when it cannot tell the rollout process of a push. Why that is
                # gone is the news.
                self.controller.link.raise_if_ended()
            raise

    def _wait_for_push(self, version: int) -> None:
        timeout_seconds = self.config.weight_sync.timeout_seconds * 2
        self.publisher.wait_for(version, timeout_seconds, lambda: self.stop.requested)

    def _evaluate(self) -> None:
        if self.controller is None or self.config.evaluation.path is None or self.stop.requested:
            return
        result = self.controller.evaluate(self.step)
        if result is not None:
            function = self.config.evaluation.function
            self.metrics_processor.log_evaluation(self.step, function, result)

    def _export(self, step: int) -> Path:
        target = Path(self.config.job.dump_folder) / "hf" / f"step-{step}"
        export_hf(
            self.model_parts,
            self.sd_adapter,
            source=self.hf_model.path,
            target=target,
            dtype=TORCH_DTYPE_MAP[self.config.checkpoint.export_dtype],
            is_writer=self.is_rank_zero,
        )
        return target

    def _log_step(self, learned: _Learned, learning_rate: float) -> None:
        batch, grad_norms = learned.batch, learned.grad_norms
        totals = self.feed.all_reduce_sum(learned.sums).tolist()
        times = self.clock.end_step()
        if self.controller is None:
            return
        num_updates = max(len(grad_norms), 1)
        metrics = metrics_from_sums(totals, num_updates) | {
            "grad_norm": sum(grad_norms) / num_updates,
            "lr": learning_rate,
            "policy_version": float(self.step),
            "data/trained_tokens": float(batch.num_trained_tokens),
            "time/tokens_per_second": batch.num_tokens / times["time/step_seconds"],
        }
        metrics |= times | self.rollout_metrics | self.publisher.metrics()
        self.metrics_processor.log_step(self.step, metrics)

    def _report(self, hf_checkpoint: Path) -> None:
        assert self.controller is not None
        folder = Path(self.config.job.dump_folder)
        logs = self.metrics_processor
        assert logs.steps is not None and logs.evaluations is not None
        summary: dict[str, Any] = {
            "steps": self.step,
            "seconds": round(time.perf_counter() - self.begin, 1),
            **summarise(logs.steps.records, logs.evaluations.records),
            "policy_version": self.step,
            "server_version": self.controller.served_version(),
            "weight_sync_failures": self.publisher.num_failures,
            "hf_checkpoint": str(hf_checkpoint),
        }
        write_summary(folder, summary)
        draw_reward_curve(folder, logs.steps.records)
        self.metrics_processor.close()
        print(json.dumps(summary, indent=2))
        print(f"Everything is in {folder}: metrics.jsonl, samples.jsonl, reward_curve.png.")

    # -- checkpoint and end ------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # As one string: a checkpoint takes lists apart, and this one's length changes.
        progress = msgspec.json.encode(self.progress).decode()
        return super().state_dict() | {"prompt_progress": progress}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.progress = msgspec.json.decode(state_dict["prompt_progress"], type=PromptProgress)

    def close(self) -> None:
        """Ends threads and children; harmless when some were never started."""
        if hasattr(self, "publisher"):
            self.publisher.close()
        if hasattr(self, "feed"):
            self.feed.close()
        if self.controller is not None:
            self.controller.close()
        super().close()


def main(args: list[str] | None = None) -> int:
    """Trains as the command line says; returns the process's exit status."""
    return run(GRPOTrainer, sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    leave(main)
