# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Defines the interface from which the training loop takes its steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import FetchAddress
from torchtitan.grpo.data.planner import PlannedPart, StepPlanner, open_sample_log
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.observe.sample_log import SampleLog
from torchtitan.grpo.types import PromptProgress, ServerInfo

if TYPE_CHECKING:
    from torchtitan.grpo.rollout.link import EvaluationResult, RolloutLink


class StepSource(ABC):
    """Plans the steps of a run, one after another, on rank 0 alone.

    Methods that need servers or a rollout process do nothing in a source that has neither. The
    trainer calls :meth:`start` once, then :meth:`next_step` for each part of each step, and
    :meth:`close` at the end, which must work in any state.

    Attributes:
        progress: Progress through the prompts, including the last step whose parts were all returned.
        is_exhausted: Whether :meth:`next_step` has returned None because no batches are left, so that
            the run ends as after its last step. False if the run was asked to stop.
        link: Connection to the rollout process, if the source has one.
        servers: Inference servers that were present at the start; empty before :meth:`start`.
        on_arrival: Called in :meth:`next_step` once the rollouts are there and only their plan is missing.
    """

    is_exhausted = False
    link: "RolloutLink | None" = None
    _held: tuple[Any, ...] | None = None

    def __init__(
        self,
        config: JobConfig,
        model: HFModel,
        start_version: int,
        progress: PromptProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config, self.progress = config, progress
        self.servers: list[ServerInfo] = []
        self._should_stop = should_stop
        self.on_arrival: Callable[[], None] = lambda: None
        self._planner = StepPlanner(config, model)
        self.samples: SampleLog = open_sample_log(config, model, start_version)

    @abstractmethod
    def start(self) -> None:
        """Makes the source ready. Returns early if the run is asked to stop."""

    @abstractmethod
    def next_step(self, version: int, num_ranks: int) -> PlannedPart | None:
        """Plans the batch that is trained on the weights of ``version``, or its next part.

        Returns None if the run is asked to stop or no batches are left.
        """

    def _hold_samples(self, step: int) -> None:
        """Keeps the samples of the planned batch until its step has been taken."""
        planner = self._planner
        self._held = step, planner.groups, planner.advantages, planner.trained

    def write_samples(self, values: np.ndarray | None = None) -> None:
        """Writes the samples of the last batch, with ``StepResult.of_tokens`` if the step has been taken."""
        if self._held is not None:
            (step, groups, advantages, trained), self._held = self._held, None
            of_tokens = {} if values is None else self._planner.by_rollout(values)
            self.samples.write(step, groups, advantages, trained, of_tokens)

    def fetch_address(self, version: int) -> FetchAddress | None:
        """Returns where ranks fetch the batch of ``version``, or None if rank 0 sends rows."""
        return None

    def save(self, step: int) -> None:  # noqa: B027
        """Saves the rollouts in flight beside the checkpoint of ``step``, without waiting."""

    def wait_saved(self, step: int, timeout_seconds: float) -> int | None:
        """Waits for :meth:`save`; returns the number of saved rollouts, or None after the timeout."""
        return 0

    @property
    def is_evaluating(self) -> bool:
        """Whether the result of a requested evaluation has not been taken yet."""
        return False

    def request_evaluation(self, version: int, pinned: Sequence[str] = ()) -> bool:
        """Requests an evaluation under ``version``, without waiting; returns False if none can run.

        An evaluation that is still running is abandoned. If ``pinned`` has URLs, only these servers take part.
        """
        return False

    def take_evaluation(self) -> "EvaluationResult | None":
        """Returns the result of the requested evaluation, or None if it is not complete; never waits."""
        return None

    def wait_evaluation(self, version: int) -> "EvaluationResult | None":
        """Waits for the requested result; None if nothing was requested or the run is to stop."""
        return None

    def served_version(self) -> int:
        """Returns the lowest version that a server reports, or -1 if no server answers."""
        return -1

    def attend(self) -> None:  # noqa: B027
        """Handles messages of the rollout process, without waiting; raises if the process has ended."""

    def raise_if_ended(self) -> None:  # noqa: B027
        """Raises the reason if the rollout process has ended by itself."""

    def close(self) -> None:
        """Ends child processes and closes files; harmless if nothing was started."""
        try:
            self.write_samples()
        finally:
            self.samples.close()
