# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the ratings of recorded rollouts, which no live teacher has vouched for.

`config_checks/teacher.py` asks the same of the settings of a live run. A file may hold ratings although
the run that replays it names no teacher, and is then taught by them all the same.
"""

from collections.abc import Sequence

import numpy as np

from torchtitan.grpo.data.files import DataError
from torchtitan.grpo.data.record import GroupRecord, RolloutRecord
from torchtitan.grpo.job_config import JobConfig


def check_ratings(group: GroupRecord, where: str, *, are_needed: bool) -> None:
    """Refuses a group whose ratings are incomplete or cannot be trained on.

    Args:
        group: The group, whose logprobs are finite, one for each completion token.
        where: Key, file, line and group; the beginning of each message.
        are_needed: Whether a group without ratings is refused, too.

    Raises:
        DataError: If a rating is missing, has not one finite number for each completion token, or
            stands in a group in which others have none.
    """
    num_rollouts = len(group.rollouts)
    num_rated = sum(rollout.teacher_logprobs is not None for rollout in group.rollouts)
    if are_needed and num_rated < num_rollouts:
        raise DataError(
            f"{where}: each rollout must have a teacher's rating (teacher.urls), but "
            f"{num_rollouts - num_rated} of {num_rollouts} have none. Replay a file that was recorded "
            "with a teacher, or remove teacher.urls."
        )
    if 0 < num_rated < num_rollouts:
        raise DataError(
            f"{where}: all rollouts of a group must have a teacher's rating (teacher_logprobs), or "
            f"none, because each is compared with the mean of all; got {num_rated} of {num_rollouts}."
        )
    for i, rollout in enumerate(group.rollouts):
        if rollout.teacher_logprobs is not None:
            _check_rating(rollout, rollout.teacher_logprobs, f"{where}, rollout {i}")


def check_taught_settings(groups: Sequence[GroupRecord], where: str, config: JobConfig) -> None:
    """Refuses settings, of now or of the recorded run, under which ratings would say something else.

    Raises:
        DataError: If the groups have ratings that are trained on, and such a setting.
    """
    rated = [r for group in groups for r in group.rollouts if r.teacher_logprobs is not None]
    if not rated or config.teacher.coef == 0:
        return
    if any(rollout.new_rows for rollout in rated):
        raise DataError(
            f"{where}: rollouts with a teacher's rating must have no new_rows, because a teacher reads an "
            'episode from its beginning. Record it with rollout.earlier_turns = "as_written", or set '
            "teacher.coef = 0 to leave the ratings out."
        )
    threshold = config.grpo.off_policy_mask_threshold
    if threshold:
        raise DataError(
            f"{where}: grpo.off_policy_mask_threshold must be 0 for rollouts with a teacher's rating, got "
            f"{threshold:g}: it leaves out sequences by the sign of their advantage, and with a teacher "
            "each token has its own. Set it to 0, or set teacher.coef = 0 to leave the ratings out."
        )
    if config.rollout.temperature != 1:
        raise DataError(
            f"{where}: rollouts with a teacher's rating must have been sampled with "
            f"rollout.temperature = 1, got {config.rollout.temperature:g}: teachers rate tokens at "
            "temperature 1. Set teacher.coef = 0 to leave the ratings out."
        )


def _check_rating(rollout: RolloutRecord, rating: list[float], where: str) -> None:
    num_tokens = len(rollout.completion_ids)
    if len(rating) != num_tokens:
        raise DataError(
            f"{where}: each of the {num_tokens} completion tokens must have a teacher's logprob, got "
            f"{len(rating)}."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        divergence = np.array(rollout.logprobs, np.float32) - np.array(rating, np.float32)
    if not np.isfinite(divergence).all():
        raise DataError(
            f"{where}: teacher_logprobs must be finite in float32, and so must be their difference from "
            "logprobs."
        )
