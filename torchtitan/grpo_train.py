# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Asynchronous GRPO on torchtitan.

    torchrun --rdzv-backend torchtitan_grpo --nproc_per_node=2 -m torchtitan.grpo_train \
        --job.config_file X.toml

Rank 0 takes groups of rollouts from the rollout process, plans the step and scatters the rows.
All ranks compute the loss and step the optimizer. New weights are pushed to the servers in the
background while the next step runs.
"""

# ruff: noqa: E402  (the device must be settled before torchtitan's modules read it)

import os
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan.grpo.system import spans
from torchtitan.grpo.system.device import lower_timeouts, settle_device

settle_device()

import torch.distributed as dist

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.controller import open_step_source
from torchtitan.grpo.data.feed import Feed, Signal, TrainBatch
from torchtitan.grpo.data.step_source import StepSource
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.observe.metrics_processor import GRPOMetricsProcessor
from torchtitan.grpo.observe.profiling import StepClock, profilers
from torchtitan.grpo.observe.summary import RunOutcome
from torchtitan.grpo.resume import checkpoint
from torchtitan.grpo.resume.checkpoint_manager import GRPOCheckpointManager
from torchtitan.grpo.run_folder.replacing import Removal
from torchtitan.grpo.run_folder.start_record import record_start
from torchtitan.grpo.start.entry import leave, run
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.training.evaluations import Evaluations, HeldOutLoss
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.guards import Guards
from torchtitan.grpo.training.learner import StepResult, build_learner
from torchtitan.grpo.training.loan import build_loan
from torchtitan.grpo.training.memory_choice import resolve_kept
from torchtitan.grpo.training.model_spec import build_policy_runner, tried_train_spec
from torchtitan.grpo.training.policy_probe import build_probe
from torchtitan.grpo.training.ranks import RankZeroTurn, patience_seconds, rank_role
from torchtitan.grpo.training.utilization import build_utilization
from torchtitan.grpo.types import PromptProgress
from torchtitan.grpo.upstream.parallelism import ParallelDims
from torchtitan.grpo.weight_sync.build import build_publisher
from torchtitan.grpo.weight_sync.publisher import Publisher, PublisherFailed


class GRPOTrainer(Trainer):
    """Learns from rollouts. ``channel`` carries calls between ranks."""

    checkpointer: GRPOCheckpointManager
    metrics_processor: GRPOMetricsProcessor
    publisher: Publisher

    def __init__(
        self, job_config: JobConfig, hf_model: HFModel, stop: StopRequest, channel: RankChannel
    ) -> None:
        self.config, self.hf_model, self.stop, self.channel = job_config, hf_model, stop, channel
        self.begin = time.perf_counter()
        self.progress = PromptProgress()
        self.stopped = False
        super().__init__(job_config)
        self.sd_adapter = self.train_spec.state_dict_adapter(self.model_args, str(hf_model.path))
        self.checkpointer = GRPOCheckpointManager(
            job_config.checkpoint, job_config.job.dump_folder, model_parts=self.model_parts,
            optimizers=self.optimizers, lr_schedulers=self.lr_schedulers,
            states={"train_state": self}, sd_adapter=None,
        )  # fmt: skip
        self.is_rank_zero = dist.get_rank() == 0
        self.runner = build_policy_runner(self)
        self.clock = StepClock()
        self.guards = Guards(job_config, logger.warning if self.is_rank_zero else lambda _: None)
        self.role = rank_role(self.parallel_dims, has_output=self.runner.has_output)
        self.source: StepSource | None = None  # on rank 0, once started
        self.evaluations: Evaluations | None = None  # the same
        self.removal: Removal | None = None  # of the run that this one replaces, on rank 0
        self.feed = Feed(
            self.role.batch_rank,
            job_config.training.seq_len,
            patience_seconds(job_config),
            job_config.rollout.batch_timeout_seconds,
        )
        self.utilization = build_utilization(self, job_config, hf_model)
        self.learner = build_learner(
            self, self.runner, self.feed, self.role, self.guards, self.enter, self._before_step
        )
        self.loan = build_loan(self, self.feed, self.learner)
        self.rank_zero = RankZeroTurn(self.feed, stop, self._explain_failure, self.loan.receive)

    def init_distributed(self) -> ParallelDims:
        """Connects the ranks, and finds the checkpoint before the model is built."""
        dims = super().init_distributed()
        os.environ.pop(spans.VARIABLE, None)  # of a run whose program has started this one
        if self.config.observe.timeline:  # now rank 0 has moved an earlier run's files
            spans.open_spans(Path(self.config.job.dump_folder), f"rank {dist.get_rank()}")
        self.channel.start()
        self.begins = checkpoint.find_start(self.config, self.hf_model)
        steps = self.begins.record.schedule_steps
        self.train_spec = tried_train_spec(self.hf_model, self.config, self.device, steps)
        resolve_kept(self.config, self.hf_model, self.device)
        return dims

    def enter(self, phase: str) -> None:
        """Reports the new phase of this rank to the other ranks and to the monitor."""
        self.channel.board.enter(phase)
        self.phases.enter(phase)

    def train(self) -> None:
        self._load_weights()
        self.first_step = self.step
        self._start()
        with profilers(self.config, self.step) as running:
            while not self.stopped and self.should_continue_training():
                batch = self._next_batch()
                if batch is None:
                    break
                self.gc_handler.run(self.step + 1)
                if not self._train_step(batch):
                    break
                self._after_step()
                for profiler in running:
                    profiler.step()
        self._finish()

    def _load_weights(self) -> None:
        self.enter("loading weights")
        is_adapted = self.config.lora.rank > 0
        if is_adapted:  # its checkpoints hold only adapters
            checkpoint.load_weights(self, self.sd_adapter, self.hf_model)
        if not checkpoint.load(self, self.begins, self.learner.critic) and not is_adapted:
            checkpoint.load_weights(self, self.sd_adapter, self.hf_model)
        self.channel.board.complete(self.step)

    def _start(self) -> None:
        """Starts rollouts, and pushes the trainer's weights before anything is sampled."""
        self.enter("starting rollouts")
        self.stopped = self.rank_zero.run(self._start_rollouts)
        if self.stopped:
            return
        self.publisher = self._build_publisher()
        self.probe = build_probe(self, self.runner, self.feed, self.role, self.hf_model.vocab_size)
        self.metrics_processor.start(self.step)
        self.metrics_processor.monitor.servers = self.publisher.server_states
        self._publish(self._reserve_slot())
        if self.source is not None:
            self.evaluations = Evaluations(
                self.config,
                self.source,
                self.publisher,
                self.metrics_processor.log_evaluation,
                self.loan.before_wait,
                self.enter,
            )
            # Without a further step, the others do not wait for rank 0 here, and `_settle` does all of this.
            if self.should_continue_training():
                with self.rank_zero.releasing_others():
                    self.enter("waiting for the first push")
                    self.loan.before_wait(self.step)  # also what the probe has used
                    self._wait_for_push(self.step)
                    self._evaluate()
        self.held_out: HeldOutLoss | None = None
        if self.config.sft.held_out_path is not None:
            self.held_out = HeldOutLoss(
                self, self.runner, self.feed, self.role, self.rank_zero, self.hf_model,
                self.begins.record.date,
            )  # fmt: skip
        self._measure_held_out()
        logger.info(f"Training starts at step {self.step + 1}")
        self.clock.restart()

    def _next_batch(self) -> TrainBatch | None:
        """Returns this rank's rows of the next step, or of its next part; None as the run ends."""
        self.enter("waiting for rollouts")
        self.channel.raise_if_lost()
        with self.clock.measure("wait_data"):
            if self.source is None:
                self.publisher.raise_if_failed()
                received = self.loan.receive()
                self.stopped = received in (Signal.STOP, Signal.HALT)
                if received is Signal.HALT:
                    self.guards.halt()
                return received if isinstance(received, TrainBatch) else None
            with self.rank_zero.releasing_others():
                self.publisher.raise_if_failed()
                step = self.source.next_step(self.step, self.role.num_batch_ranks)
                self.channel.raise_if_lost()
                self.publisher.raise_if_failed()
            self.guards.judge_unscored(self.step + 1, step.metrics if step is not None else {})
            if step is None or self.stop.requested or self.guards.reason:
                self.stopped = not self.source.is_exhausted
                stop = Signal.HALT if self.guards.reason else Signal.STOP
                self.feed.send_signal(stop if self.stopped else Signal.END)
                return None
            self.loan.on_batch()
            self.rollout_metrics = step.metrics
            if self.utilization is not None:
                self.utilization.add(step.plan, begins_batch=step.part.begins_batch)
            return self.feed.send_step(
                step.plan,
                self._reserve_slot() if step.part.ends_batch else 0,
                self.source.progress,
                self.source.fetch_address(self.step),
                part=step.part,
            )

    def _train_step(self, batch: TrainBatch) -> bool:
        """Takes a step and starts its push; returns False if the run is to end before the step is complete."""
        if self.config.rollout.stream:
            learned = self.learner.learn_in_parts(batch, self.step + 1, self._next_batch)
        else:
            learned = self.learner.learn(batch, self.step + 1)
        self.loan.before_step()  # without an optimizer step, nothing has waited for it
        if learned is None:
            self.stopped = self.stopped or self.guards.reason is not None
            return False
        self.step += 1
        self.learner.end_step()
        with self.clock.measure("boundary_stall"):
            self._publish(learned.batch.publish_slot)
            if not self.config.grpo.async_weight_update:
                with self.phases.within("push"):
                    self.stopped = self.rank_zero.run(lambda: self._wait_for_push(self.step))
        self.ntokens_seen += learned.batch.num_tokens
        self.progress = learned.batch.progress
        self._log_step(learned)
        self.channel.board.complete(self.step)
        self.phases.complete(self.step)
        return True

    def _before_step(self) -> None:
        """Waits until lent optimizer states are back and no checkpoint or push reads the weights."""
        self.loan.before_step()
        with self.phases.within("checkpoint"):
            self.checkpointer.maybe_wait_for_staging()
        clock = self.clock
        with clock.measure("boundary_stall"), clock.measure("fence"), self.phases.within("fence"):
            self.publisher.fence()

    def _publish(self, slot: int) -> None:
        """Starts a push of the weights; if it is attested, computes the probe's log-probabilities."""
        self.enter("publishing weights")
        self.publisher.publish(self.step, slot)
        if self.publisher.is_attested(self.step):
            self.publisher.probes.put(self.step, self.probe.logprobs())

    def _after_step(self) -> None:
        if self.step == self.first_step + 1:
            lower_timeouts(self.parallel_dims, self.config.comm.train_timeout_seconds)
            self.removal = Removal(self.config) if self.is_rank_zero else None
        is_last = self.step == self.config.training.steps
        self._save(is_last)
        if self._is_due(self.config.grpo.hf_export_interval) and not is_last:
            self._export()
        if self._is_due(self.config.sft.held_out_interval) and not is_last:
            self._measure_held_out()
        # At the end the others do not wait for rank 0 here: `_settle` records what is left.
        if self.evaluations is not None and not is_last:
            with self.rank_zero.releasing_others():
                if self.evaluations.follow(self.step, is_stopping=self.stop.requested):
                    self.clock.restart()

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _save(self, is_last: bool) -> None:
        self.enter("saving a checkpoint")
        self.checkpointer.save(self.step, last_step=is_last)
        config = self.config.checkpoint
        is_due = config.enable and (is_last or self._is_due(config.interval))
        if is_due and self.source and self.checkpointer.missing is None:
            with self.rank_zero.releasing_others():
                self.source.save(self.step)

    def _finish(self) -> None:
        """Ends a stopped run with a checkpoint, a finished one with export and report.

        Raises GuardStopped, or LastSaveFailed if a finished run was not saved.
        """
        self.enter("ending")
        is_halted = self.stopped and self.guards.reason is not None
        if self.stopped:
            checkpoint.save_stopped(self, self.source, self.first_step, self.stop)
        else:
            self._conclude()
        if hasattr(self, "publisher"):
            # Rank 0's publisher first: those of the other ranks still have to answer it.
            self.stopped = self.rank_zero.run(self.publisher.close)
        if is_halted:
            self.guards.raise_if_stopped()
        if not self.stopped:
            self.checkpointer.raise_if_missing()

    def _conclude(self) -> None:
        """Exports the model; then serves and evaluates its last version, and reports."""
        if self.first_step < self.step < self.config.training.steps:
            # A replayed file came to its end. A longer file can continue from here.
            checkpoint.save_whole(self.checkpointer, self.step)
        # The export comes first: a server that does not answer must not cost what was learned.
        folder = self._export(is_last=True)
        if self.first_step < self.step:
            self._measure_held_out()
        self.stopped = self.rank_zero.run(lambda: self._settle(folder))

    def _settle(self, hf_checkpoint: Path) -> None:
        assert self.source is not None
        self.enter("ending")  # which is no part of the export
        self.loan.before_wait(self.step)
        if self.evaluations is not None:
            self.evaluations.finish(self.step)
        self._wait_for_push(self.step)
        self._evaluate()
        self.publisher.raise_if_failed()
        if self.stop.requested:
            return
        seconds, version = time.perf_counter() - self.begin, self.source.served_version()
        failures = self.publisher.num_failures
        self.metrics_processor.report(
            RunOutcome(self.step, seconds, version, failures, hf_checkpoint)
        )

    def _start_rollouts(self) -> None:
        self.metrics_processor.monitor.start()
        # Servers that are launched on the devices need their memory at once.
        self.loan.before_wait(self.step)
        # Assigned before it is started: what has been started by then must be closed.
        self.source = open_step_source(
            self.config,
            self.hf_model,
            start_version=self.step,
            progress=self.progress,
            date=self.begins.record.date,
            should_stop=self._should_stop,
            loan=self.loan,
            on_hangup=self.stop.on_hangup,
            uses_kept_rollouts=not self.begins.unusable_because,
        )
        self.source.on_arrival = lambda: self.enter("planning the step")
        self.metrics_processor.follow(self.source.link)
        self.source.start()
        record_start(self.config, self.step, sys.argv[1:], self.source.servers)

    def _should_stop(self) -> bool:
        """Returns whether to stop waiting for rollouts: stop request, failed publisher, guard, lost rank."""
        has_failed = hasattr(self, "publisher") and self.publisher.failure is not None
        link = self.source.link if self.source is not None else None
        is_lost = link is not None and self.guards.judge_servers(self.step + 1, link.stuck_seconds)
        return self.stop.requested or has_failed or is_lost or self.channel.lost is not None

    def _explain_failure(self, error: BaseException) -> None:
        # A publisher fails if it cannot report a push to a rollout process that has ended.
        if isinstance(error, PublisherFailed) and self.source is not None:
            self.source.raise_if_ended()

    def _build_publisher(self) -> Publisher:
        if not self.config.has_servers:
            return Publisher()
        source = self.source
        return build_publisher(
            self.config, self.model_parts, self.sd_adapter, self.device, self.channel,
            source.link if source else None, source.servers if source else [],
            self.hf_model.vocab_size,
        )  # fmt: skip

    def _reserve_slot(self) -> int:
        return self.publisher.reserve_slot() if self.is_rank_zero else 0

    def _wait_for_push(self, version: int) -> None:
        timeout_seconds = self.config.weight_sync.timeout_seconds * 2
        self.publisher.wait_for(
            version, timeout_seconds, lambda: self._should_stop_waiting(version)
        )

    def _should_stop_waiting(self, version: int) -> bool:
        """Returns whether to stop waiting for a push; raises what ended the rollout process."""
        self.metrics_processor.wait_push(version, self.publisher.server_states())
        if self.source is not None:
            self.source.attend()
        return self.stop.requested

    def _evaluate(self) -> None:
        if self.evaluations is not None and not self.stop.requested:
            self.evaluations.run(self.step)

    def _measure_held_out(self) -> None:
        if self.held_out is None:
            return
        self.enter("evaluating")
        self.metrics_processor.log_held_out(self.step, self.held_out.compute())
        self.clock.restart()

    def _export(self, *, is_last: bool = False) -> Path:
        self.enter("exporting the model")
        return checkpoint.export(self, self.sd_adapter, self.hf_model, is_last=is_last)

    def _log_step(self, learned: StepResult) -> None:
        self.enter("recording metrics")
        times = self.clock.end_step()
        if self.source is None:
            return
        metrics = learned.metrics(times["time/step_seconds"])
        metrics["policy_version"] = float(self.step)
        metrics |= times | self.rollout_metrics | self.publisher.metrics()
        passes, compared = self.learner.take_pass_metrics()
        metrics |= compared | self.phases.wall_metrics(passes)
        metrics |= self.guards.metrics() | self.runner.take_metrics() | self.loan.metrics()
        if self.utilization is not None:
            metrics |= self.utilization.metrics(times["time/step_seconds"])
        self.source.write_samples(learned.of_tokens)
        samples = self.source.samples.latest
        self.metrics_processor.log_step(self.step, metrics, samples, "; ".join(learned.spikes))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | checkpoint.progress_state(self.progress)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.progress = checkpoint.progress_from(state_dict)

    def close(self) -> None:
        """Ends threads and children, some of which may never have been started."""
        for name in ("publisher", "runner", "feed", "checkpointer"):
            if hasattr(self, name):
                getattr(self, name).close()
        if self.source is not None:
            self.source.close()
        if self.removal is not None:
            self.removal.close()
        super().close()


def main(args: list[str] | None = None) -> int:
    return run(GRPOTrainer, sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    leave(main)
