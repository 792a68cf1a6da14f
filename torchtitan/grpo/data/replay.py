# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains on recorded rollouts, without servers, rollout process, prompts or rewards.

If a teacher has rated the rollouts, settings must be valid for a run with a teacher. This module checks
that, because `config_checks/learning.py` cannot see what a file holds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.planner import PlannedPart
from torchtitan.grpo.data.record import BatchRecord, RecordReader
from torchtitan.grpo.data.step_source import StepSource
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.rollout.admission import part_size
from torchtitan.grpo.rollout.completion_checks import rollout_problem
from torchtitan.grpo.rollout.rollout_metrics import group_metrics
from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.types import BatchPart, PromptProgress, Rollout, RolloutGroup

_KEY = "rollout.replay"


class ReplaySource(StepSource):
    """Plans the batches of a recorded file; see :class:`StepSource`.

    Step ``k + 1`` trains on batch ``k`` of the file (from 0), also in a resumed run. Ages of samples are
    relative to the version with which the batch was recorded, and ``progress`` is the recorded progress.
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
        super().__init__(config, model, start_version, progress, should_stop)
        self._path = config.rollout.replay
        self._vocab_size = model.vocab_size
        self._start_version = start_version
        self._reader = RecordReader(self._path, model.vocab_size, config.rollout.temperature, _KEY)
        self._num_parts = config.rollout.stream_parts if config.rollout.stream else 1
        self._batch: BatchRecord | None = None
        self._parts: list[Sequence[RolloutGroup]] = []  # of it, that are left
        self._batches: Iterator[tuple[str, BatchRecord]] = iter(())
        self._position = 0

    def start(self) -> None:
        """Reads the whole file once, so that a bad batch is found before training."""
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
        self._hold_samples(version + 1)
        return replace(step, metrics=group_metrics(groups) | step.metrics)

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
    size = part_size(len(groups), num_parts)
    return [groups[begin : begin + size] for begin in range(0, len(groups), size)]


def check_batch(batch: BatchRecord, where: str, vocab_size: int, row_len: int) -> None:
    """Raises :class:`DataError` for an untrainable batch; ``where`` names setting, file and batch."""
    ids = [group.group_id for group in batch.groups]
    _require(len(ids) > 0, f"{where}: a batch must have a group, got none.")
    _require(len(set(ids)) == len(ids), f"{where}: group_id must be unique, got {ids}.")
    _require(batch.version >= 0, f"{where}: version must be at least 0, got {batch.version}.")
    borders = [-1, *batch.progress.open, batch.progress.position]
    _require(
        all(a < b for a, b in pairwise(borders)),
        f"{where}: progress.open must be ascending places below progress.position, got "
        f"{batch.progress}.",
    )
    for group in batch.groups:
        here = f"{where}, group {group.group_id}"
        _require(len(group.rollouts) > 0, f"{here}: a group must have a rollout, got none.")
        for i, rollout in enumerate(group.rollouts):
            problem = rollout_problem(rollout, vocab_size=vocab_size, row_len=row_len)
            if rollout.num_trained == 0:
                problem = problem or "sampled must leave a completion token to train on"
            _require(problem is None, f"{here}, rollout {i}: {problem}.")
        newest = max(segment.version for r in group.rollouts for segment in r.segments)
        _require(
            newest <= batch.version,
            f"{here}: segments must name versions up to that of the batch ({batch.version}), got "
            f"{newest}.",
        )
        _check_rated_group(group, here)


def check_ratings_are_used(batch: BatchRecord, where: str, config: JobConfig) -> None:
    """Raises :class:`DataError` if a batch lacks ratings, or if its ratings would be ignored or wrong."""
    for group in batch.groups:
        here = f"{where}, group {group.group_id}"
        is_rated = group.rollouts[0].teacher_logprobs is not None
        if is_rated and config.teacher.coef > 0:
            for problem in _problems(group, config):
                raise DataError(
                    f"{here}: a teacher's ratings {problem}, or set teacher.coef = 0 to replay only the "
                    "rewards."
                )
        elif is_rated:
            num_top, top_k = _num_top(group.rollouts[0]), config.teacher.top_k
            _require(
                not top_k or num_top in (0, top_k),
                f"{here}: a teacher's ratings must hold as many of its most likely tokens as "
                f"teacher.top_k ({top_k}), got {num_top}. Set teacher.top_k = {num_top} or 0.",
            )
        else:
            _require(
                not config.teacher.urls,
                f"{here}: each rollout must have a teacher's rating (teacher.urls), but this group has "
                "none, and a replay asks no server. Replay a file that was recorded with a teacher, or "
                "remove teacher.urls.",
            )


def _check_rated_group(group: RolloutGroup, where: str) -> None:
    num_rated = sum(rollout.teacher_logprobs is not None for rollout in group.rollouts)
    _require(
        num_rated in (0, len(group.rollouts)),
        f"{where}: all rollouts of a group must have teacher_logprobs, or none, got {num_rated} of "
        f"{len(group.rollouts)}. The mean over the group would not be that of its tokens.",
    )
    numbers = {_num_top(rollout) for rollout in group.rollouts}
    _require(
        len(numbers) == 1 and (num_rated > 0 or numbers == {0}),
        f"{where}: all rated rollouts of a group must have the same number of most likely tokens "
        f"(teacher_top_ids), and others none, got {sorted(numbers)}.",
    )


def _num_top(rollout: Rollout) -> int:
    return 0 if rollout.teacher_top_ids is None else rollout.teacher_top_ids.shape[1]


def _problems(group: RolloutGroup, config: JobConfig) -> Iterator[str]:
    grpo, temperature = config.grpo, config.rollout.temperature
    num_top, top_k = _num_top(group.rollouts[0]), config.teacher.top_k
    if grpo.filter_zero_advantage:
        yield (
            "cannot be used with grpo.filter_zero_advantage, which leaves out groups with equal "
            "rewards, although the teacher's part differs. Set grpo.filter_zero_advantage = false"
        )
    if grpo.off_policy_mask_threshold != 0 and not top_k:
        yield (
            "cannot be used with grpo.off_policy_mask_threshold, which leaves out sequences by the sign "
            f"of their advantage, got {grpo.off_policy_mask_threshold:g}. Set it to 0"
        )
    if config.has_critic and not top_k:
        yield (
            "cannot be used with grpo.advantage = 'gae', whose advantages are not relative to a group's "
            "mean as the teacher's part is. Choose another grpo.advantage"
        )
    if top_k and num_top != top_k:
        yield (
            f"must hold as many of its most likely tokens as teacher.top_k ({top_k}), got "
            f"{num_top or 'none'}, and a replay asks no server. Set teacher.top_k = {num_top}"
        )
    if temperature != 1:
        yield (
            f"must be of rollouts of rollout.temperature = 1, got {temperature:g}. Replay a file of "
            "that temperature"
        )
    if any(rollout.new_rows for rollout in group.rollouts):
        yield (
            "must be of rollouts that a model reads from their beginning, but one has new_rows. Remove "
            "its teacher_logprobs"
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise DataError(message)
