# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which snapshot slot may be written, and which may be read.

    FREE --reserve--> RESERVED --filled--> PENDING --take_newest--> SENDING --release--> FREE
                          ^                   |
                          +---- reserve ------+   (a waiting snapshot is superseded)

Only rank 0 keeps these states; its decisions travel to the other ranks with the batch
(which slot to fill) and with the pusher's commands (which slot to read). Two slots are
enough for the newest weights always to find a place: at most one slot is being sent, and
what merely waits may be overwritten by something newer.
"""

import threading
from enum import Enum


class SlotState(Enum):
    FREE = "free"
    RESERVED = "reserved"
    PENDING = "pending"
    SENDING = "sending"


class SlotTable:
    """The states of all slots; every method is safe to call from any thread."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(
                f"weight_sync.num_slots must be at least 2 (one being sent, one being "
                f"filled), got {num_slots}."
            )
        self._changed = threading.Condition()
        self._states = [SlotState.FREE] * num_slots
        self._versions = [-1] * num_slots
        self.num_superseded = 0

    def reserve(self) -> int:
        """Picks the slot for the coming weights: a free one, else the oldest that waits."""
        with self._changed:
            free = self._in_state(SlotState.FREE)
            if free:
                slot = free[0]
            else:
                slot = min(self._in_state(SlotState.PENDING), key=lambda s: self._versions[s])
                self.num_superseded += 1
            self._states[slot] = SlotState.RESERVED
            return slot

    def filled(self, slot: int, version: int) -> None:
        """The reserved slot now holds ``version``."""
        with self._changed:
            assert self._states[slot] is SlotState.RESERVED, (slot, self._states)
            self._states[slot], self._versions[slot] = SlotState.PENDING, version
            self._changed.notify_all()

    def take_newest(self, timeout_seconds: float) -> tuple[int, int] | None:
        """Waits for a filled slot; returns it with its version, now SENDING.

        Older waiting slots are freed: nobody needs them any more. None after the timeout.
        """
        with self._changed:
            pending = self._changed.wait_for(
                lambda: self._in_state(SlotState.PENDING), timeout_seconds
            )
            if not pending:
                return None
            newest = max(pending, key=lambda s: self._versions[s])
            for slot in pending:
                if slot != newest:
                    self._states[slot] = SlotState.FREE
                    self.num_superseded += 1
            self._states[newest] = SlotState.SENDING
            return newest, self._versions[newest]

    def release(self, slot: int) -> None:
        """All ranks have read the slot."""
        with self._changed:
            assert self._states[slot] is SlotState.SENDING, (slot, self._states)
            self._states[slot] = SlotState.FREE

    def _in_state(self, wanted: SlotState) -> list[int]:
        return [slot for slot, state in enumerate(self._states) if state is wanted]
