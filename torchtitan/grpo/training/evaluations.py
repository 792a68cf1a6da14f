# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides when a run evaluates, and computes the loss of held-out examples.

The run waits only for the evaluations before the first step and after the last one.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing

import torch

from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import Feed, TrainBatch
from torchtitan.grpo.data.planner import StepPlanner
from torchtitan.grpo.data.step_source import StepSource
from torchtitan.grpo.data.supervised import ExampleStream
from torchtitan.grpo.losses.objective import negative_log_likelihood
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.rollout.results import EvaluationResult
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.ranks import RankRole, RankZeroTurn
from torchtitan.grpo.training.runner import ForwardRunner
from torchtitan.grpo.types import PromptProgress
from torchtitan.grpo.weight_sync.publisher import Publisher

Log = Callable[[int, EvaluationResult, Mapping[str, int]], None]
"""Records an evaluation: the current step, the result, and :meth:`Evaluations.counts`."""


class Evaluations:
    """Requests evaluations and records their results, on rank 0's training thread.

    :meth:`begin` requests an evaluation beside training, and the first :meth:`collect` that finds the
    result records it. Neither waits. With several servers, one of them keeps the evaluated weights
    (``evaluation.pin``) for at most ``evaluation.timeout_seconds``. If that server becomes the last one
    that can take new weights, or leaves the run, the evaluation begins again after the step.
    ``before_wait`` may lend the ranks' devices, because nothing is trained during :meth:`run`.
    """

    def __init__(
        self,
        config: JobConfig,
        source: StepSource,
        publisher: Publisher,
        log: Log,
        before_wait: Callable[[int], None] = lambda version: None,
        enter: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._source, self._publisher, self._log = source, publisher, log
        self._before_wait, self._enter = before_wait, enter
        # Without servers, which replays and supervised training do not have, nothing is ever due.
        self._is_on = config.has_servers and bool(evaluation_sets(config.evaluation))
        # The servers' weights must not depend on when they take them: in the foreground every
        # server has taken them before the next step, and deterministic figures are reproducible.
        is_async = config.grpo.async_weight_update
        self.is_beside_training = is_async and not config.rollout.deterministic
        self._interval = config.evaluation.interval
        self._pins = config.evaluation.pin
        self._longest_pin = config.evaluation.timeout_seconds
        self._pinned_at: float | None = None
        self._must_begin = False  # at the next opportunity, whatever the interval
        self._was_refused = False
        self.num_left_out = self.num_begun_again = 0

    def is_due(self, step: int) -> bool:
        """Returns whether an evaluation must :meth:`begin` after this step, regularly or as a repetition."""
        is_usual = self._is_on and self._interval > 0 and step % self._interval == 0
        return is_usual or self._must_begin

    def counts(self) -> dict[str, int]:
        return {"left_out": self.num_left_out, "begun_again": self.num_begun_again}

    def follow(self, step: int, *, is_stopping: bool) -> bool:
        """Records an evaluation that has ended, and begins the next one when due. Returns whether it waited."""
        self.collect(step)
        if is_stopping or not self.is_due(step):
            return False
        if self.is_beside_training:
            self.begin(step)
            return False
        self.run(step)
        return True

    def begin(self, step: int) -> None:
        """Requests an evaluation unless one is running. Never waits."""
        if self._source.is_evaluating and not self._must_begin:
            self.num_left_out += 1
            if self.num_left_out == 1:
                logger.warning(
                    f"The evaluation of step {step} is left out: the one before it is still "
                    "running. Raise evaluation.interval, or lower evaluation.num_prompts. Others "
                    "that are left out are counted in evaluation/left_out."
                )
            return
        pinned = self._publisher.pin(step) if self._pins else []
        self._pinned_at = time.monotonic() if pinned else None
        is_refused = not self._source.request_evaluation(step, pinned)
        if is_refused:
            self._unpin()
            if not self._was_refused:
                logger.warning(
                    f"The evaluation of step {step} could not be requested, because nothing can "
                    "generate its completions now. It is requested again after each step."
                )
        self._must_begin = self._was_refused = is_refused

    def collect(self, step: int) -> None:
        """Records the result of the running evaluation if it has arrived. Never waits."""
        if self._source.is_evaluating:
            self._record(step, self._source.take_evaluation())
            if self._pinned_at is not None and not self._publisher.pinned():
                self._pinned_at = None
                self._must_begin = True
                self.num_begun_again += 1
                logger.warning(
                    "No server is left at the weights of the evaluation that is running: it takes "
                    "new weights again, because no other server takes any, or it has left the run. "
                    "The evaluation is begun again with newer weights (evaluation/begun_again)."
                )
            is_late = self._pinned_at is not None and (
                time.monotonic() - self._pinned_at > self._longest_pin
            )
            if is_late:
                logger.warning(
                    "The server that was left at the weights of an evaluation takes new ones again: "
                    f"the evaluation has not ended within {self._longest_pin:g} s "
                    "(evaluation.timeout_seconds)."
                )
                self._unpin()

    def finish(self, step: int) -> None:
        if self._source.is_evaluating:
            self._record(step, self._source.wait_evaluation(step))
        self._unpin()

    def run(self, step: int) -> None:
        """Evaluates, and waits for the result unless the run is asked to stop."""
        if not self._is_on:
            return
        self._enter("evaluating")
        self._before_wait(step)
        self.finish(step)
        if not self._source.is_evaluating and self._source.request_evaluation(step):
            self._record(step, self._source.wait_evaluation(step))

    def _record(self, step: int, result: EvaluationResult | None) -> None:
        if result is not None:
            self._unpin()
            self._must_begin = False
            self._log(step, result, self.counts())

    def _unpin(self) -> None:
        if self._pinned_at is not None:
            self._pinned_at = None
            self._publisher.pin(None)


class HeldOutLoss:
    """The mean negative log-likelihood of held-out completion tokens. All methods are collective.

    Rank 0 reads ``sft.held_out_path`` and sends each rank its rows, once for all evaluations.
    """

    def __init__(
        self,
        trainer: Trainer,
        runner: ForwardRunner,
        feed: Feed,
        role: RankRole,
        rank_zero: RankZeroTurn,
        model: HFModel,
        date: str,
    ) -> None:
        config: JobConfig = trainer.job_config  # pyright: ignore[reportAssignmentType]
        self._runner, self._feed, self._device = runner, feed, trainer.device
        self._is_counted = role.is_counted
        if feed.rank == 0:
            key, path = "sft.held_out_path", config.sft.held_out_path
            assert path is not None, "the loss is computed only with a file"
            with rank_zero.releasing_others():
                with closing(ExampleStream(config, model, path, key, date=date)) as stream:
                    examples = stream.all()
                planner, num_ranks = StepPlanner(config, model), role.num_batch_ranks
                plan = planner.plan_supervised(examples, num_ranks=num_ranks).plan
            received = feed.send_step(plan, 0, PromptProgress())
        else:
            received = feed.receive()
        assert isinstance(received, TrainBatch), f"rank 0 sends rows, got {received}"
        self._rows = received.minibatches

    def compute(self) -> float:
        """Returns nats per token, the same on every rank."""
        total = torch.zeros(2, dtype=torch.float64)
        for rows in self._rows:
            output = self._runner.forward(rows.to(self._device))
            if output is not None and self._is_counted:
                is_given = (rows.ptx_weights > 0).double()
                total[0] += negative_log_likelihood(output[..., 0].double().cpu(), is_given)
                total[1] += is_given.sum()
        loss, num_tokens = self._feed.all_reduce_sum(total).tolist()
        return loss / num_tokens
