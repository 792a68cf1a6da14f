# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the teacher's ratings in a file of recorded rollouts.

A group has a rating of each of its tokens, or none at all. The settings of the run that replays it must
be those that a run with a teacher may have; `config_checks/learning.py` cannot see what a file holds.
"""

from collections.abc import Iterator

import numpy as np

from torchtitan.grpo.data.files import DataError
from torchtitan.grpo.data.record import BatchRecord, GroupRecord, RolloutRecord, read_top
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.rollout.completion_checks import rating_problem


def check_rated_group(group: GroupRecord, where: str, vocab_size: int) -> None:
    """Refuses ratings that do not fit the rollouts of a group.

    Raises:
        DataError: If some rollouts are rated and others are not, if a rating is not one finite
            number for each completion token, or if its most likely tokens are not different tokens
            of the vocabulary with such numbers.
    """
    num_rated = sum(rollout.teacher_logprobs is not None for rollout in group.rollouts)
    if num_rated not in (0, len(group.rollouts)):
        raise DataError(
            f"{where}: all rollouts of a group must have teacher_logprobs, or none, got {num_rated} of "
            f"{len(group.rollouts)}. The mean over the group would not be that of its tokens."
        )
    numbers = {_num_top(rollout) for rollout in group.rollouts}
    if len(numbers) > 1 or (num_rated == 0 and numbers != {0}):
        raise DataError(
            f"{where}: all rated rollouts of a group must have the same number of most likely tokens "
            f"(teacher_top), and others none, got {sorted(numbers)}."
        )
    for i, rollout in enumerate(group.rollouts):
        _check_rating(rollout, f"{where}, rollout {i}", vocab_size)


def check_ratings_are_used(batch: BatchRecord, where: str, config: JobConfig) -> None:
    """Refuses settings under which the ratings of a batch would be lost or wrong, or are missing.

    Raises:
        DataError: If there is such a setting, or if a teacher is to teach and has not rated a group.
    """
    for group in batch.groups:
        is_rated = any(rollout.teacher_logprobs is not None for rollout in group.rollouts)
        if is_rated and config.teacher.coef > 0:
            for problem in _problems(group, config):
                raise DataError(
                    f"{where}, group {group.group_id}: a teacher's ratings {problem}, or "
                    "teacher.coef = 0 to replay the rewards alone."
                )
        elif is_rated:
            _check_number(group, where, config.teacher.top_k)
        elif config.teacher.urls and not is_rated:
            raise DataError(
                f"{where}: each rollout must have a teacher's rating (teacher.urls), but group "
                f"{group.group_id} has none, and a replay asks no server. Replay a file that was "
                "recorded with a teacher, or remove teacher.urls."
            )


def _check_number(group: GroupRecord, where: str, top_k: int) -> None:
    """Refuses ratings that only metrics are computed from, if they do not have ``teacher.top_k`` tokens."""
    num_top = _num_top(group.rollouts[0])
    if top_k and num_top not in (0, top_k):
        raise DataError(
            f"{where}, group {group.group_id}: a teacher's ratings must hold as many of its most likely "
            f"tokens as teacher.top_k ({top_k}), got {num_top}. Set teacher.top_k = {num_top} or 0."
        )


def _num_top(rollout: RolloutRecord) -> int:
    return 0 if rollout.teacher_top is None else rollout.teacher_top.k


def _problems(group: GroupRecord, config: JobConfig) -> Iterator[str]:
    grpo, temperature = config.grpo, config.rollout.temperature
    if grpo.filter_zero_advantage:
        yield (
            "cannot be used with grpo.filter_zero_advantage, which leaves out groups with equal "
            "rewards, although the teacher's part differs. Set grpo.filter_zero_advantage = false"
        )
    if grpo.off_policy_mask_threshold != 0 and not config.teacher.top_k:
        yield (
            "cannot be used with grpo.off_policy_mask_threshold, which leaves out sequences by the sign "
            f"of their advantage, got {grpo.off_policy_mask_threshold:g}. Set it to 0"
        )
    num_top, top_k = _num_top(group.rollouts[0]), config.teacher.top_k
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


def _check_rating(rollout: RolloutRecord, where: str, vocab_size: int) -> None:
    num_tokens = len(rollout.completion_ids)
    try:
        top = None if rollout.teacher_top is None else read_top(rollout.teacher_top)
    except ValueError as error:
        raise DataError(
            f"{where}: teacher_top must hold k ids and k logprobs for each of the {num_tokens} "
            "completion tokens, and k must be at least 1."
        ) from error
    ratings = rollout.teacher_logprobs
    logprobs = None if ratings is None else np.array(ratings, np.float64)
    if problem := rating_problem(logprobs, top, num_tokens, vocab_size):
        raise DataError(f"{where}: {problem}.")
