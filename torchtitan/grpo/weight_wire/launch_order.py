# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lets threads launch collectives in the order in which they were announced.

The kernel of an NCCL broadcast occupies its GPU until all members of the group have launched
theirs. If two workers of a server launched the broadcasts of two groups in opposite orders, and
a GPU could run only one of them, neither would ever end. So all workers launch in the order of
the announcements, which is the same for all of them. A launch does not wait for the end of the
broadcasts before it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class LaunchOrder:
    """Hands out tickets, and lets each launch after all lower ones. It is thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_tickets = 0
        self._first_waiting = 0
        self._passed: set[int] = set()
        self._is_closed = False

    def ticket(self) -> int:
        """Returns the next ticket. Its holder must launch, or call :meth:`give_up`."""
        with self._changed:
            self._num_tickets += 1
            return self._num_tickets - 1

    @contextmanager
    def turn(self, ticket: int, timeout_seconds: float) -> Iterator[None]:
        """Waits until all lower tickets have launched or given up; the block launches.

        Raises RuntimeError if the turn does not come in time, or after :meth:`close`.
        """
        with self._changed:
            has_come = self._changed.wait_for(
                lambda: self._is_closed or self._first_waiting >= ticket, timeout_seconds
            )
            if self._is_closed:
                raise RuntimeError("The update was dropped before the broadcast.")
            if not has_come:
                raise RuntimeError(
                    f"Broadcasts that were announced earlier did not begin within "
                    f"{timeout_seconds:g} s."
                )
        try:
            yield
        finally:
            self.give_up(ticket)

    def give_up(self, ticket: int) -> None:
        """Lets higher tickets launch. It is idempotent."""
        with self._changed:
            if ticket >= self._first_waiting:
                self._passed.add(ticket)
            while self._first_waiting in self._passed:
                self._passed.remove(self._first_waiting)
                self._first_waiting += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
