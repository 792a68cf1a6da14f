# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which snapshot slot may be written, and which may be read.

    FREE --reserve--> RESERVED --filled--> PENDING --take_newest--> SENDING --release--> FREE
                          ^                   |                        |                  ^
                          +---- reserve ------+                        +-hold-> HELD -release
                (a waiting snapshot is superseded)

Only rank 0 keeps these states; its decisions travel to the other ranks with the batch
(which slot to fill) and with the publisher's commands (which slot to read). Two slots are
enough for the newest weights always to find a place: at most one slot is being sent, and
what merely waits may be overwritten by something newer. Leaving out the new version instead
could end in a deadlock: a trainer may wait for rollouts of just that version.

What is SENDING is being gathered, one version at a time. That is one reference, which ends
when all ranks have read. Where buckets lie in the slots (see `slot_memory.py`), gathering
copies nothing, and the slot is HELD for as long as servers may be sent the version. Slots
beyond the two are there for that; when none is to spare, buckets are copied out.

No rank writes a slot that is read or copied into, although copies run on a thread of their
own, and ranks are ahead of or behind one another:

- A copy never meets another copy: each rank makes its copies one at a time, in order.
- A copy never meets a reader. The table never lets a slot be both RESERVED and SENDING or
  HELD, and a slot turns SENDING, and then HELD, only with the version that it was last
  reserved for. So every decision to write the slot was made either before that version's,
  and then that copy was also started before that version's on every rank, which the reader
  waits for; or after the release, and then all ranks have read and nobody sends it.

The fence is not needed for this; it keeps the optimizer from overwriting what is being
copied. A model check of all interleavings stands in the tests.
"""

import threading
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self


class SlotState(Enum):
    FREE = "free"
    RESERVED = "reserved"
    PENDING = "pending"
    SENDING = "sending"
    HELD = "held"


@dataclass(frozen=True)
class Slots:
    """The states of all slots; each method returns what they are afterwards.

    Attributes:
        states: Of each slot.
        versions: That each slot holds, once it is filled; -1 before.
        max_held: How many may be HELD.
        num_superseded: Versions that were never taken, because a newer one came.
    """

    states: tuple[SlotState, ...]
    versions: tuple[int, ...]
    max_held: int = 0
    num_superseded: int = field(default=0, compare=False)

    @classmethod
    def free(cls, num_slots: int, max_held: int = 0) -> Self:
        """All slots, free: ``num_slots``, and as many again as may be held.

        Raises:
            ValueError: Fewer than two.
        """
        if num_slots < 2:
            raise ValueError(
                f"weight_sync.num_slots must be at least 2 (one being sent, one being "
                f"filled), got {num_slots}."
            )
        total = num_slots + max_held
        return cls((SlotState.FREE,) * total, (-1,) * total, max_held)

    def reserve(self) -> tuple[Self, int]:
        """Picks the slot for the coming weights: a free one, else the oldest that waits."""
        free = self._in_state(SlotState.FREE)
        waiting = self._in_state(SlotState.PENDING)
        assert free or waiting, f"one slot is reserved at a time, and one sent: {self}"
        slot = free[0] if free else min(waiting, key=lambda s: self.versions[s])
        after = self._with(slot, SlotState.RESERVED)
        return (after if free else replace(after, num_superseded=self.num_superseded + 1)), slot

    def filled(self, slot: int, version: int) -> Self:
        """The reserved slot now holds ``version``."""
        assert self.states[slot] is SlotState.RESERVED, (slot, self)
        versions = self.versions[:slot] + (version,) + self.versions[slot + 1 :]
        return replace(self._with(slot, SlotState.PENDING), versions=versions)

    def take_newest(self) -> tuple[Self, int] | None:
        """The filled slot with the newest version, now SENDING; None where none is filled.

        Older waiting slots are freed: nobody needs them any more.
        """
        waiting = self._in_state(SlotState.PENDING)
        if not waiting:
            return None
        assert SlotState.SENDING not in self.states, f"one slot is sent at a time: {self}"
        newest = max(waiting, key=lambda s: self.versions[s])
        after = self._with(newest, SlotState.SENDING)
        for slot in waiting:
            if slot != newest:
                after = after._with(slot, SlotState.FREE)
        return replace(after, num_superseded=self.num_superseded + len(waiting) - 1), newest

    def can_hold(self) -> bool:
        """Whether the slot that is SENDING may be held, too."""
        return len(self._in_state(SlotState.HELD)) < self.max_held

    def hold(self, slot: int) -> Self:
        """All ranks are done with the slot, but servers are sent its version from there."""
        assert self.states[slot] is SlotState.SENDING and self.can_hold(), (slot, self)
        return self._with(slot, SlotState.HELD)

    def release(self, slot: int) -> Self:
        """Nobody reads the slot any more."""
        assert self.states[slot] in (SlotState.SENDING, SlotState.HELD), (slot, self)
        return self._with(slot, SlotState.FREE)

    def _with(self, slot: int, state: SlotState) -> Self:
        return replace(self, states=self.states[:slot] + (state,) + self.states[slot + 1 :])

    def _in_state(self, wanted: SlotState) -> list[int]:
        return [slot for slot, state in enumerate(self.states) if state is wanted]


class SlotTable:
    """Rank 0's :class:`Slots`; every method is safe to call from any thread.

    The lock is held for a few microseconds at a time, never while somebody waits.
    """

    def __init__(self, num_slots: int, max_held: int = 0) -> None:
        self._slots = Slots.free(num_slots, max_held)
        self._changed = threading.Condition()

    @property
    def num_superseded(self) -> int:
        """Versions that were never sent, because a newer one came."""
        return self._slots.num_superseded

    def reserve(self) -> int:
        """Picks the slot for the coming weights: a free one, else the oldest that waits."""
        with self._changed:
            self._slots, slot = self._slots.reserve()
            return slot

    def filled(self, slot: int, version: int) -> None:
        """The copy of ``version`` into the reserved slot is about to be started.

        Nobody is woken up: on a busy machine a thread that the training thread wakes takes
        its core. See :meth:`wake`.
        """
        with self._changed:
            self._slots = self._slots.filled(slot, version)

    def wake(self) -> None:
        """Lets whoever waits for a filled slot look again."""
        with self._changed:
            self._changed.notify_all()

    def take_newest(self, timeout_seconds: float) -> tuple[int, int] | None:
        """Waits for a filled slot; returns it with its version, now SENDING.

        Older waiting slots are freed: nobody needs them any more. None after the timeout.
        """
        with self._changed:
            taken = self._changed.wait_for(self._slots_after_taking, timeout_seconds)
            if taken is None:
                return None
            self._slots, slot = taken
            return slot, self._slots.versions[slot]

    def can_hold(self) -> bool:
        """Whether the slot that was taken last may be held once it is gathered."""
        with self._changed:
            return self._slots.can_hold()

    def hold(self, slot: int) -> None:
        """Servers are sent what was taken from the slot until :meth:`release`."""
        with self._changed:
            self._slots = self._slots.hold(slot)

    def release(self, slot: int) -> None:
        """Nobody reads the slot any more."""
        with self._changed:
            self._slots = self._slots.release(slot)

    def _slots_after_taking(self) -> tuple[Slots, int] | None:
        return self._slots.take_newest()
