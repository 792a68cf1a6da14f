# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ends a run if none of many consecutive groups can be trained on.

The number of groups at which the run ends is :meth:`KeptGroups.bound`. The rules are:

- The bound is enough groups for several batches, and at least :data:`FEWEST_GROUPS`.
- A run in which few groups are kept may go on: the bound is at least :data:`USUAL_GAPS` times
  the mean number of groups that ended for each one that was kept.
- A group counts only once all groups that started earlier have ended. Otherwise short completions
  that are dropped would be counted while long ones that will be kept are being generated.
- Groups that dynamic sampling leaves out do not count: ``rollout.dynamic_sampling_limit`` limits them.
"""

from collections import Counter
from dataclasses import dataclass

FEWEST_GROUPS = 256
BATCHES = 8
USUAL_GAPS = 20


@dataclass(frozen=True)
class Cause:
    """Why groups are not trained on: in messages, "12 ``words``", and then the sentence ``remedy``."""

    words: str
    remedy: str


FAILED = Cause(
    "got too few completions from servers and environments",
    "Read rollout_process.log, which names the failures.",
)
TRUNCATED = Cause(
    "had too few completions that were not truncated at rollout.max_new_tokens (rollout.drop_truncated)",
    "Raise rollout.max_new_tokens, or set rollout.drop_truncated = false.",
)
SHORT = Cause(
    "had too few completions of rollout.min_completion_tokens",
    "Lower rollout.min_completion_tokens.",
)
UNSCORED = Cause(
    "got too few rewards, because reward.functions gave none (None)",
    "Let the functions give 0 to a completion that failed.",
)
SCORING_FAILED = Cause(
    "could not be scored, because a reward function raised, took too long, waited in vain or gave no "
    "number",
    "Correct reward.functions; rollout_process.log has the traceback.",
)
NOT_ACCEPTED = Cause(
    "had too few completions that rollout.should_accept accepts", "Loosen rollout.should_accept."
)
EQUAL = Cause(
    "had rewards that are all equal (rollout.dynamic_sampling)",
    "Choose prompts of medium difficulty, or lower rollout.dynamic_sampling_limit.",
)
UNRATED = Cause("got no rating from a teacher", "Check the servers of teacher.urls.")
EXPIRED = Cause(
    "had tokens that were written with older weights than the server had confirmed",
    "Check whether a server is restarted again and again.",
)
OVERDUE = Cause(
    "were overdue (rollout.overdue)",
    "Raise rollout.max_head_offpolicyness, or change rollout.overdue.",
)


class NothingKept(RuntimeError):
    """So many consecutive groups could not be trained on that the run must stop."""


class KeptGroups:
    """Counts which groups of a run were kept for training or dropped."""

    def __init__(self, groups_per_batch: int) -> None:
        self._least = max(FEWEST_GROUPS, BATCHES * groups_per_batch)
        self._num_started = self._num_ended = self._num_kept = 0
        self._usual_gap = 0
        self._running: dict[int, int] = {}  # numbers of groups in the order of their start
        self._counting: list[int] = []  # numbers of dropped groups that may count
        self._fates: Counter[Cause] = Counter()  # since a group was kept last

    def start(self, group_id: int) -> None:
        """Records that a group has been started, perhaps again."""
        self._running.pop(group_id, None)
        self._running[group_id] = self._num_started
        self._num_started += 1

    def keep(self, group_id: int) -> None:
        self._running.pop(group_id, None)
        self._num_ended += 1
        self._num_kept += 1
        self._usual_gap = self._num_ended // self._num_kept
        self._counting.clear()
        self._fates.clear()

    def drop(self, group_id: int, cause: Cause) -> None:
        """Records a group that is not trained on. Raises :class:`NothingKept` once the bound is reached."""
        number = self._running.pop(group_id, self._num_started)
        self._num_ended += 1
        self._fates[cause] += 1
        if cause is not EQUAL:
            self._counting.append(number)
        bound = self.bound()
        oldest = next(iter(self._running.values()), self._num_started)
        if sum(counting < oldest for counting in self._counting) >= bound:
            remedies = " ".join(cause.remedy for cause, _ in self._fates.most_common())
            raise NothingKept(
                f"At least one of {bound} consecutive groups must be kept for training, but of the groups "
                f"since one was kept last {self._list()}. {remedies}"
            )

    def bound(self) -> int:
        """The number of consecutive dropped groups at which the run ends."""
        return max(self._least, USUAL_GAPS * self._usual_gap)

    def describe(self) -> str:
        return f"since a group was kept last, {self._list()}" if self._fates else ""

    def _list(self) -> str:
        return ", ".join(f"{number} {cause.words}" for cause, number in self._fates.most_common())
