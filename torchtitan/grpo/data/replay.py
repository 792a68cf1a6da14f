# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains on recorded rollouts, without servers, rollout process, prompts or rewards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.data.files import DataError
from torchtitan.grpo.data.planner import PlannedPart, StepPlanner, open_sample_log
from torchtitan.grpo.data.record import BatchRecord, RecordReader
from torchtitan.grpo.data.replay_checks import check_batch, check_ratings_are_used
from torchtitan.grpo.data.step_source import OfflineSource
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.rollout.admission import part_size
from torchtitan.grpo.rollout.rollout_metrics import group_metrics
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.types import BatchPart, PromptProgress, RolloutGroup

_KEY = "rollout.replay"


class ReplaySource(OfflineSource):
    """Plans the batches of a recorded file; see :class:`StepSource`.

    Batch ``k`` of the file (from 0) is what step ``k + 1`` is trained on, so that a resumed run
    continues from its checkpoint. The ages of samples count from the version that the batch was
    recorded with. ``progress`` is that of the recorded run.
    """

    def __init__(
        self,
        config: JobConfig,
        model: HFModel,
        *,
        start_version: int,
        progress: PromptProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        assert config.rollout.replay is not None
        super().__init__()
        self.config = config
        self.progress = progress
        self.is_exhausted = False
        self._path = config.rollout.replay
        self._vocab_size = model.vocab_size
        self._start_version = start_version
        self._should_stop = should_stop
        self._reader = RecordReader(self._path, model.vocab_size, config.rollout.temperature, _KEY)
        self._planner = StepPlanner(config, model)
        self._num_parts = config.rollout.stream_parts if config.rollout.stream else 1
        self._batch: BatchRecord | None = None
        self._parts: list[Sequence[RolloutGroup]] = []  # of it, that are left
        self._batches: Iterator[tuple[str, BatchRecord]] = iter(())
        self._position = 0
        self.samples = open_sample_log(config, model, start_version)

    def start(self) -> None:
        """Reads the whole file once, so that a bad line is found before training."""
        num_batches = 0
        for where, batch in self._reader:
            if self._should_stop():
                return
            check_batch(batch, where, self._vocab_size, self.config.training.seq_len)
            check_ratings_are_used(batch, where, self.config)
            num_batches += 1
        if num_batches == 0 or num_batches < self._start_version:
            raise DataError(
                f"{_KEY}: {self._path} must hold at least {max(self._start_version, 1)} batches "
                f"(this run is at step {self._start_version}), got {num_batches}."
            )
        if self._reader.was_cut_off:
            logger.warning(f"{_KEY}: {self._path} is cut off; its complete batches are used.")
        logger.info(f"{_KEY}: {num_batches} batches in {self._path}; nothing is generated.")
        if evaluation_sets(self.config.evaluation):
            logger.info(f"[evaluation] is not used with {_KEY}: there is no server to ask.")
        self._batches = iter(self._reader)

    def next_step(self, version: int, num_ranks: int) -> PlannedPart | None:
        begins_batch = not self._parts
        if begins_batch:
            self._batch = self._seek(version)
            if self._batch is None:
                return None
            self._parts = split_groups(self._batch.groups, self._num_parts)
        assert self._batch is not None
        groups = self._parts.pop(0)
        step = self._planner.plan(
            groups,
            part=BatchPart.at(begins_batch=begins_batch, ends_batch=not self._parts),
            step=version,
            version=self._batch.version,
            num_ranks=num_ranks,
        )
        if not step.part.ends_batch:
            return step
        groups = self._planner.groups
        self.progress = self._batch.progress
        self.samples.write(version + 1, groups, self._planner.advantages)
        return replace(step, metrics=group_metrics(groups) | step.metrics)

    def close(self) -> None:
        self.samples.close()

    def _seek(self, index: int) -> BatchRecord | None:
        assert index >= self._position, f"batch {index} comes after batch {self._position}"
        for _, batch in self._batches:
            self._position += 1
            if self._should_stop():
                return None
            if self._position > index:
                return batch
        self.is_exhausted = True
        return None


def split_groups(groups: Sequence[RolloutGroup], num_parts: int) -> list[Sequence[RolloutGroup]]:
    """Splits a whole batch's groups into at most ``num_parts`` parts, in order."""
    size = part_size(len(groups), num_parts)
    return [groups[begin : begin + size] for begin in range(0, len(groups), size)]
