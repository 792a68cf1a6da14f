# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which snapshot slot may be written, and which may be read.

    FREE --reserve--> RESERVED --filled--> PENDING --take_newest--> SENDING --release--> FREE
                          ^                   |                        |                  ^
                          +---- reserve ------+                        +-hold-> HELD -release
                (the waiting snapshot is superseded)

Only rank 0 keeps these states. It tells the other ranks with each batch which slot to fill, and in
the leader's calls which slot to read. Two slots always have room for the newest weights: at
most one slot is SENDING, and one that is only PENDING may be overwritten by a newer version. If
the newer version were left out instead, the run could deadlock, because the trainer may wait for
rollouts of that version.

A slot that is SENDING is being gathered, one version at a time, until all ranks have read it. If
buckets lie in the slots (see `slot_layout.py`), the slot then stays HELD as long as the version
may be sent to servers. The slots beyond the first two exist for this. If too many are HELD, buckets
are copied out of the slot instead.

No rank writes a slot that is being read or copied into, although copies run on a separate thread
and ranks may be ahead of or behind one another:

- Two copies never overlap, because each rank makes its copies one at a time, in order.
- A copy never overlaps with a reader. A RESERVED slot is neither SENDING nor HELD, and a slot is
  read only with the version for which it was last reserved. The copies of earlier reservations were
  started earlier on every rank, and the reader waits for the last copy. The next reservation follows
  the release, when all ranks have read the slot and no source rank sends from it.

These guarantees do not need the fence, which keeps the optimizer from overwriting parameters that
are being copied. `test_interleavings.py` checks all interleavings of a model of this protocol.
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
    """The states of all slots, immutable: each method that changes a state returns a new object.

    ``versions`` holds the version with which each slot was last filled. ``num_superseded`` counts
    the versions that were never taken. At most ``max_held`` slots may be HELD.
    """

    states: tuple[SlotState, ...]
    versions: tuple[int, ...]
    max_held: int = 0
    num_superseded: int = field(default=0, compare=False)

    @classmethod
    def free(cls, num_slots: int, max_held: int = 0) -> Self:
        assert num_slots >= 2, "one slot is sent while another is filled"
        total = num_slots + max_held
        return cls((SlotState.FREE,) * total, (-1,) * total, max_held)

    def reserve(self) -> tuple[Self, int]:
        """Reserves a FREE slot or, if there is none, the oldest PENDING one."""
        free = self._in_state(SlotState.FREE)
        waiting = self._in_state(SlotState.PENDING)
        assert free or waiting, f"at most one slot may be RESERVED and one SENDING: {self}"
        slot = free[0] if free else min(waiting, key=lambda s: self.versions[s])
        after = self._with(slot, SlotState.RESERVED)
        return (after if free else replace(after, num_superseded=self.num_superseded + 1)), slot

    def filled(self, slot: int, version: int) -> Self:
        assert self.states[slot] is SlotState.RESERVED, (slot, self)
        versions = self.versions[:slot] + (version,) + self.versions[slot + 1 :]
        return replace(self._with(slot, SlotState.PENDING), versions=versions)

    def take_newest(self) -> tuple[Self, int] | None:
        """Makes the PENDING slot with the newest version SENDING, and frees the other PENDING ones."""
        waiting = self._in_state(SlotState.PENDING)
        if not waiting:
            return None
        assert SlotState.SENDING not in self.states, f"at most one slot may be SENDING: {self}"
        newest = max(waiting, key=lambda s: self.versions[s])
        after = self._with(newest, SlotState.SENDING)
        for slot in waiting:
            if slot != newest:
                after = after._with(slot, SlotState.FREE)
        return replace(after, num_superseded=self.num_superseded + len(waiting) - 1), newest

    def can_hold(self) -> bool:
        return len(self._in_state(SlotState.HELD)) < self.max_held

    def hold(self, slot: int) -> Self:
        """Makes a slot that all ranks have read HELD, because its version is sent from the slot."""
        assert self.states[slot] is SlotState.SENDING and self.can_hold(), (slot, self)
        return self._with(slot, SlotState.HELD)

    def release(self, slot: int) -> Self:
        assert self.states[slot] in (SlotState.SENDING, SlotState.HELD), (slot, self)
        return self._with(slot, SlotState.FREE)

    def _with(self, slot: int, state: SlotState) -> Self:
        return replace(self, states=self.states[:slot] + (state,) + self.states[slot + 1 :])

    def _in_state(self, wanted: SlotState) -> list[int]:
        return [slot for slot, state in enumerate(self.states) if state is wanted]


class SlotVersions:
    """Records which version each slot of this rank holds or is being filled with.

    The training thread writes the record, and the gathering thread waits for its changes. The
    lock is never held while a thread waits. ``published`` is the newest version, at first -1.
    """

    def __init__(self) -> None:
        self.published = -1
        self._changed = threading.Condition()
        self._version_in: dict[int, int] = {}

    def filled(self, slot: int, version: int) -> None:
        """Records that the copy of ``version`` into ``slot`` is about to be started.

        Wakes no thread, because that thread might take the training thread's core on a busy machine.
        :meth:`wake` does so later.
        """
        with self._changed:
            self._version_in[slot] = self.published = version

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_filled(self, slot: int, version: int, timeout_seconds: float) -> None:
        """Waits until this rank's training thread, which may lag behind rank 0's, has filled a slot."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._version_in.get(slot) == version, timeout_seconds
            ):
                raise TimeoutError(
                    f"This rank must publish version {version} within {timeout_seconds:g} s "
                    f"after rank 0, but slot {slot} still holds version "
                    f"{self._version_in.get(slot)}. Check whether the training thread of this rank "
                    "is still running."
                )


class SlotTable(SlotVersions):
    """Rank 0's slots. The training thread reserves and fills them; :class:`Versions` does the rest."""

    def __init__(self, num_slots: int, max_held: int = 0) -> None:
        super().__init__()
        self._slots = Slots.free(num_slots, max_held)

    @property
    def num_superseded(self) -> int:
        return self._slots.num_superseded

    def reserve(self) -> int:
        with self._changed:
            self._slots, slot = self._slots.reserve()
            return slot

    def filled(self, slot: int, version: int) -> None:
        with self._changed:  # the lock is reentrant
            self._slots = self._slots.filled(slot, version)
            super().filled(slot, version)

    def take_newest(self, timeout_seconds: float) -> tuple[int, int] | None:
        """Waits for a PENDING slot, makes it SENDING, and returns its index and its version."""
        with self._changed:
            taken = self._changed.wait_for(lambda: self._slots.take_newest(), timeout_seconds)
            if taken is None:
                return None
            self._slots, slot = taken
            return slot, self._slots.versions[slot]

    def can_hold(self) -> bool:
        return self._slots.can_hold()

    def hold(self, slot: int) -> None:
        with self._changed:
            self._slots = self._slots.hold(slot)

    def release(self, slot: int) -> None:
        with self._changed:
            self._slots = self._slots.release(slot)
