# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which prompt groups may start, and which groups form the next batch.

This module does bookkeeping only, without asyncio. With ``G = groups_per_batch`` and ``eta =
max_staleness``:

- The policy version is the number of batches trained on, regardless of how many optimizer steps
  each batch took. Batch ``b`` (counted from 0) turns version ``b`` into ``b + 1``. A sample
  whose oldest token was generated under version ``s`` therefore has age ``b - s`` in batch
  ``b``.
- A group is *open* from its start until it is consumed or closed. A group started on a server
  of version ``s`` has the *deadline* ``s + eta``: the last batch in which its age is allowed.
  When the group is finished, its deadline is recomputed from its true oldest version.
- A group may be started on a server of version ``s`` only while ``consumed + open < (s + eta +
  1) * G``.
- Batch ``b`` takes exactly ``G`` finished groups: those with the earliest deadline first, and
  among equal deadlines those started first. It waits until every deadline stays reachable after
  it: for each ``d >= b``, at most ``(d - b) * G`` of the groups with deadline ``<= d`` may stay
  open. (For ``d = b``: the batch contains every group that is due now.)
- Batch ``b`` may also be taken group by group. With ``t`` groups of it already taken, the finished
  group with the earliest deadline ``e`` may be taken next if, for each ``d`` with ``b <= d < e``, at
  most ``(d - b + 1) * G - t - 1`` groups with deadline ``<= d`` are open.

All rules preserve this invariant, where ``b`` is the next batch and ``t`` groups of it are
taken::

    for every d >= b:  number of open groups with deadline <= d  <=  (d - b + 1) * G - t

Hence no sample is ever trained at an age above ``eta``, and no group has to be discarded
because of its age. With ``eta = 0`` training is synchronous and on-policy.

The bound on finished groups that wait (``rollout.buffer_size_limit``, at least ``G`` groups)
delays only new groups. It cannot cause a deadlock: the groups that a batch waits for already run,
and restored groups continue before any new group starts.

Example: ``G = 1``, ``eta = 2``. Groups 0, 1 and 2 start under version 0 and have deadline 2.
Batch 0 takes group 0. A server with version 1 starts group 3 with deadline 3, which finishes at
once. Batch 1 nevertheless waits for group 1 or 2, because batch 2 has room for only one of
them.
"""

from collections.abc import Collection
from dataclasses import dataclass

from torchtitan.grpo.config import GRPO, Rollout


def part_size(num_groups: int, num_parts: int) -> int:
    """The number of groups in each part of a batch. The last part may be smaller."""
    return -(-num_groups // num_parts)


@dataclass
class _OpenGroup:
    start_version: int
    deadline: int
    finished: bool = False


class Admission:
    """Tracks the open groups. Batches before ``start_version`` count as consumed."""

    def __init__(self, grpo: GRPO, rollout: Rollout, start_version: int = 0) -> None:
        self.groups_per_batch = grpo.prompts_per_step
        self.max_staleness = rollout.max_head_offpolicyness
        self.next_batch = start_version
        self._num_taken = 0  # groups already taken of the next batch
        self._group_size = grpo.group_size
        self._max_concurrent = rollout.max_concurrent_rollouts
        # The option counts rollouts, while this class counts whole groups.
        limit = rollout.buffer_size_limit // grpo.group_size
        self._max_buffered = limit or 2 * self.groups_per_batch
        self._open: dict[int, _OpenGroup] = {}  # in start order

    @property
    def num_finished(self) -> int:
        return sum(group.finished for group in self._open.values())

    @property
    def num_missing(self) -> int:
        """The number of unfinished groups that the next batch waits for."""
        wanted = self.groups_per_batch - self._num_taken - self.num_finished
        return max(wanted, len(self._due()), 0)

    def lendable(
        self, free: Collection[int], server_version: int, completions_in_flight: int
    ) -> tuple[int, int]:
        """Returns how many groups another server of ``server_version`` could generate now.

        ``free`` are the open groups that need completions and that no server is generating. The first
        number returned counts groups that the next batch waits for, and the second counts others.
        """
        due_elsewhere = sum(group_id not in free for group_id in self._due())
        room = max(0, self._room(server_version))
        places = max(0, self._max_concurrent - completions_in_flight) // self._group_size
        num_groups = len(free) + min(room, places)
        missing = min(num_groups, self.num_missing - due_elsewhere)
        return missing, num_groups - missing

    def _due(self) -> list[int]:
        """The unfinished groups that are due in the next batch."""
        return [
            group_id
            for group_id, group in self._open.items()
            if not group.finished and group.deadline <= self.next_batch
        ]

    def may_start(self, server_version: int, completions_in_flight: int) -> bool:
        return self._has_capacity(completions_in_flight) and self._room(server_version) > 0

    def waits_for_trainer(self, server_version: int, completions_in_flight: int) -> bool:
        """Whether only the staleness bound or a full buffer keeps a group from starting on such a server."""
        return self._has_capacity(completions_in_flight) and self._room(server_version) <= 0

    def _has_capacity(self, completions_in_flight: int) -> bool:
        return completions_in_flight + self._group_size <= self._max_concurrent

    def _room(self, server_version: int) -> int:
        """The number of groups that may start on a server of this version; it may be negative."""
        consumed = self.next_batch * self.groups_per_batch + self._num_taken
        room = (server_version + self.max_staleness + 1) * self.groups_per_batch
        room -= consumed + len(self._open)
        return 0 if room > 0 and self.num_finished >= self._max_buffered else room

    def start(self, group_id: int, server_version: int) -> None:
        """Opens a group. :meth:`may_start` must have allowed it."""
        assert group_id not in self._open, f"group {group_id} is already open"
        self._open[group_id] = _OpenGroup(server_version, server_version + self.max_staleness)

    def start_version(self, group_id: int) -> int:
        return self._open[group_id].start_version

    def overdue(self) -> list[int]:
        """The unfinished groups that are due in the next batch, if it waits for nothing else."""
        return self._due() if self._num_taken + self.num_finished >= self.groups_per_batch else []

    def finish(self, group_id: int, oldest_version: int) -> bool:
        """Marks a group as ready for training.

        Returns ``False`` and closes the group if its oldest token was generated under a version
        below its start version, as after a server's restart: its deadline could break the invariant.
        """
        group = self._open[group_id]
        if oldest_version < group.start_version:
            self.close(group_id)
            return False
        group.deadline = oldest_version + self.max_staleness
        group.finished = True
        return True

    def close(self, group_id: int) -> None:
        del self._open[group_id]

    def take_batch(self) -> list[int] | None:
        """Consumes the next batch and returns its group IDs, or ``None`` if it must wait."""
        assert self._num_taken == 0, "groups of this batch were already taken one by one"
        chosen = self._finished_by_deadline()[: self.groups_per_batch]
        taken = set(chosen)
        left = [group.deadline for i, group in self._open.items() if i not in taken]
        if len(chosen) < self.groups_per_batch or not self._fit(left, self.groups_per_batch):
            return None
        for group_id in chosen:
            del self._open[group_id]
        self.next_batch += 1
        return chosen

    def take_next(self) -> int | None:
        """Consumes one more group of the next batch; ``None`` if the batch must wait."""
        first = next(iter(self._finished_by_deadline()), None)
        if first is None:
            return None
        deadline = self._open[first].deadline
        earlier = [g.deadline for g in self._open.values() if g.deadline < deadline]
        if not self._fit(earlier, self._num_taken + 1):
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

    def _fit(self, deadlines: list[int], num_taken: int) -> bool:
        """Whether groups can meet these deadlines once ``num_taken`` of the next batch are taken."""
        # With the deadlines sorted, n groups are due by the deadline d of the n-th group.
        return all(
            n <= (d - self.next_batch + 1) * self.groups_per_batch - num_taken
            for n, d in enumerate(sorted(deadlines), start=1)
        )

    def describe(self) -> str:
        """What the next batch waits for."""
        return (
            f"batch {self.next_batch}: {self._num_taken + self.num_finished} of "
            f"{self.groups_per_batch} groups finished, {len(self._open) - self.num_finished} running, "
            f"{len(self._due())} of them due now"
        )
