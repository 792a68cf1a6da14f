# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which prompt group may be started, and which groups make the next batch.

Pure bookkeeping, no asyncio. With ``G = groups_per_batch`` and ``eta = max_staleness``:

- The policy version is the number of batches trained on, however many optimizer steps each
  of them took. Batch ``b`` (counted from 0) turns version ``b`` into ``b + 1``, so a sample
  whose oldest token was written under version ``s`` has age ``b - s`` when it is trained in
  batch ``b``.
- A group is *open* from its start until it is consumed or closed. One started on a server
  of version ``s`` has the *deadline* ``s + eta``: the last batch in which it is young
  enough. When it is finished its deadline is taken from its true oldest version.
- A group may be started on a server of version ``s`` only while
  ``consumed + open < (s + eta + 1) * G``.
- Batch ``b`` takes exactly ``G`` finished groups, earliest deadline first, then oldest. It
  is not made before it leaves every deadline reachable: for each ``d >= b``, at most
  ``(d - b) * G`` of the groups with deadline ``<= d`` stay open. (For ``d = b``: every
  group due now is in it, so the batch waits for them.)

- Batch ``b`` may as well be taken group by group, before it is whole: the finished group
  with the earliest deadline ``e``, as long as for each ``d`` with ``b <= d < e`` the groups
  with deadline ``<= d`` still find room without its place: at most ``(d - b + 1) * G - t - 1``
  of them are open, where ``t`` groups of the batch are taken. The last of the ``G`` makes
  the batch whole.

Invariant, held by all rules, with ``b`` the next batch and ``t`` groups of it taken::

    for every d >= b:  number of open groups with deadline <= d  <=  (d - b + 1) * G - t

Hence no sample is ever trained at an age above ``eta``, and no group must be thrown away
for its age. With ``eta = 0`` training is synchronous and on-policy.

A bound of what is finished and waits (``max_buffered``, at least ``G``) holds up starts
alone. What a batch waits for is running already, so it cannot lock up; what an earlier process
had begun is gone on with before anything is started.

Example: ``G = 1``, ``eta = 2``. Groups 0, 1, 2 start under version 0, deadline 2. Batch 0
takes group 0. A server that has version 1 starts group 3, deadline 3, which finishes at
once; batch 1 nevertheless waits for group 1 or 2, for batch 2 could not hold both.
"""

from collections.abc import Iterable
from dataclasses import dataclass


def part_size(num_groups: int, num_parts: int) -> int:
    """Groups in each part of a batch but the last, which has what is left."""
    return -(-num_groups // num_parts)


@dataclass
class _OpenGroup:
    start_version: int
    deadline: int
    finished: bool = False


class Admission:
    """The ledger of open groups. See the module's docstring for the rules.

    Args:
        groups_per_batch: ``grpo.prompts_per_step``.
        max_staleness: ``rollout.max_head_offpolicyness``.
        group_size: Completions that a new group puts in flight.
        max_concurrent_rollouts: Upper bound of completions in flight.
        max_buffered: No group is started while this many are finished; at least a batch.
        start_version: Batches already trained on, which count as consumed.
    """

    def __init__(
        self,
        *,
        groups_per_batch: int,
        max_staleness: int,
        group_size: int,
        max_concurrent_rollouts: int,
        max_buffered: int | None = None,
        start_version: int = 0,
    ) -> None:
        assert max_buffered is None or max_buffered >= groups_per_batch, max_buffered
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.next_batch = start_version
        self._num_taken = 0  # of the next batch, where it is taken group by group
        self._group_size = group_size
        self._max_concurrent = max_concurrent_rollouts
        self._max_buffered = max_buffered
        self._open: dict[int, _OpenGroup] = {}  # in the order of their starts

    @property
    def num_open(self) -> int:
        """Groups started, neither consumed nor closed."""
        return len(self._open)

    @property
    def num_finished(self) -> int:
        """Open groups that wait to be trained."""
        return sum(group.finished for group in self._open.values())

    def may_start(self, server_version: int, completions_in_flight: int) -> bool:
        """Whether a group may be started now on a server of ``server_version``."""
        if completions_in_flight + self._group_size > self._max_concurrent:
            return False
        if self._max_buffered is not None and self.num_finished >= self._max_buffered:
            return False
        consumed = self.next_batch * self.groups_per_batch + self._num_taken
        room = (server_version + self.max_staleness + 1) * self.groups_per_batch
        return consumed + len(self._open) < room

    def start(self, group_id: int, server_version: int) -> None:
        """Opens a group; :meth:`may_start` must have allowed it."""
        assert group_id not in self._open, f"group {group_id} is already open"
        self._open[group_id] = _OpenGroup(server_version, server_version + self.max_staleness)

    def start_version(self, group_id: int) -> int:
        """What an open group was started with; its deadline counts from there."""
        return self._open[group_id].start_version

    def overdue(self) -> list[int]:
        """Groups that the next batch cannot be without, where it has enough others.

        Those due in it; it may also have to wait because too many are due in later ones.
        """
        due = [
            group_id
            for group_id, group in self._open.items()
            if not group.finished and group.deadline <= self.next_batch
        ]
        return due if self._num_taken + self.num_finished >= self.groups_per_batch else []

    def finish(self, group_id: int, oldest_version: int) -> bool:
        """Marks a group as ready to be trained.

        Args:
            group_id: An open group.
            oldest_version: Lowest version that wrote one of its tokens.

        Returns:
            False where the group is older than the server it was started on said, as
            after a restart of the server: its true deadline was never planned for, so it
            is closed.
        """
        group = self._open[group_id]
        if oldest_version < group.start_version:
            self.close(group_id)
            return False
        group.deadline = oldest_version + self.max_staleness
        group.finished = True
        return True

    def close(self, group_id: int) -> None:
        """Gives a group up: it is not counted any more, and makes room for another."""
        del self._open[group_id]

    def take_batch(self) -> list[int] | None:
        """The ids of the next batch's groups, now consumed; None while it must wait."""
        assert self._num_taken == 0, "this batch is taken group by group"
        chosen = self._finished_by_deadline()[: self.groups_per_batch]
        if len(chosen) < self.groups_per_batch or not self._leaves_reachable(chosen):
            return None
        for group_id in chosen:
            del self._open[group_id]
        self.next_batch += 1
        return chosen

    def take_next(self) -> int | None:
        """The id of one more group of the next batch, now consumed; None while it must wait.

        After the last group of a batch ``next_batch`` is the one behind it.
        """
        first = next(iter(self._finished_by_deadline()), None)
        if first is None or not self._leaves_place(self._open[first].deadline):
            return None
        del self._open[first]
        self._num_taken += 1
        if self._num_taken == self.groups_per_batch:
            self._num_taken, self.next_batch = 0, self.next_batch + 1
        return first

    def _finished_by_deadline(self) -> list[int]:
        finished = [group_id for group_id, group in self._open.items() if group.finished]
        # Sorting is stable, so the oldest start comes first among equal deadlines.
        return sorted(finished, key=lambda group_id: self._open[group_id].deadline)

    def _leaves_place(self, deadline: int) -> bool:
        """Whether groups due before ``deadline`` find room when one due then is taken now."""
        earlier = sorted(g.deadline for g in self._open.values() if g.deadline < deadline)
        # The n-th of them by its own deadline d is one of n that are due by then.
        return all(
            n <= (d - self.next_batch + 1) * self.groups_per_batch - self._num_taken - 1
            for n, d in enumerate(earlier, start=1)
        )

    def _leaves_reachable(self, chosen: Iterable[int]) -> bool:
        """Whether all deadlines can still be met after a batch of ``chosen``."""
        taken = set(chosen)
        left = sorted(group.deadline for i, group in self._open.items() if i not in taken)
        # The n-th group by deadline (from 1) needs n groups' room in batches next+1 .. deadline.
        return all(
            n <= (deadline - self.next_batch) * self.groups_per_batch
            for n, deadline in enumerate(left, start=1)
        )

    def describe(self) -> str:
        """One line for logs and errors: what the next batch waits for."""
        due = sum(
            not group.finished and group.deadline <= self.next_batch
            for group in self._open.values()
        )
        return (
            f"batch {self.next_batch}: {self._num_taken + self.num_finished} of "
            f"{self.groups_per_batch} groups finished, {self.num_open - self.num_finished} running, "
            f"{due} of them due now"
        )
