# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gets the teacher's rating of all rollouts of a group, or of none."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torchtitan.grpo.rollout.teachers.teacher_pool import NotRated, Rating, TeacherPool
from torchtitan.grpo.types import Rollout


class Unrated(RuntimeError):
    """A group cannot be trained on, because a rollout of it got no rating."""


class TeachersFailing(RuntimeError):
    """Raised if too many groups in a row got no rating. The run must stop."""


class GroupRater:
    """Rates the rollouts of one group at a time; ``num_waiting`` groups wait now."""

    def __init__(self, pool: TeacherPool, max_unrated_groups: int) -> None:
        self._pool = pool
        self._most = max_unrated_groups
        self._unrated_in_a_row = 0
        self.num_waiting = 0

    async def rate(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollouts with the teacher's ratings.

        Raises:
            Unrated: If a rollout got none. The others of the group are not rated any further.
            TeachersFailing: If this is the last of ``teacher.max_unrated_groups`` such groups in a row.
        """
        self.num_waiting += 1
        failed: NotRated | None = None
        pairs = [(rollout.prompt_ids, rollout.token_ids) for rollout in rollouts]
        parts = request_parts([len(p) + len(c) for p, c in pairs], self._pool.request_tokens)
        ratings: list[asyncio.Task[list[Rating]]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in parts:
                    ratings.append(tasks.create_task(self._pool.rate(pairs[part])))
        except* NotRated as errors:
            failed = next(error for error in errors.exceptions if isinstance(error, NotRated))
        finally:
            self.num_waiting -= 1
        if failed is not None:
            raise self._count(failed) from failed
        self._unrated_in_a_row = 0
        found = [rating for part in ratings for rating in part.result()]
        return [
            replace(
                rollout,
                teacher_logprobs=logprobs,
                teacher_top_ids=None if top is None else top.ids,
                teacher_top_logprobs=None if top is None else top.logprobs,
            )
            for rollout, (logprobs, top) in zip(rollouts, found, strict=True)
        ]

    def describe(self) -> str:
        """Describes what waits for a teacher; empty if nothing does."""
        if self.num_waiting == 0:
            return ""
        text = f"{self.num_waiting} groups wait for a teacher"
        error = self._pool.last_error
        return f"{text}, whose last error was: {error}" if error else text

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call."""
        return self._pool.take_metrics()

    def _count(self, failed: NotRated) -> RuntimeError:
        self._unrated_in_a_row += 1
        if self._unrated_in_a_row < self._most:
            return Unrated(str(failed))
        return TeachersFailing(
            f"{self._unrated_in_a_row} groups in a row got no rating (teacher.max_unrated_groups = "
            f"{self._most}). {failed}"
        )


def request_parts(lengths: Sequence[int], most_tokens: int) -> list[slice]:
    """Splits rollouts of these lengths, in order, into those that share a request.

    ``request_parts([3, 4, 5, 2], 8)`` is ``[0:2, 2:4]``. A longer rollout is a request by itself.
    """
    begins: list[int] = []
    total = 0
    for i, length in enumerate(lengths):
        total += length
        if not begins or total > most_tokens:
            begins.append(i)
            total = length
    return [slice(a, b) for a, b in pairwise([*begins, len(lengths)])]
