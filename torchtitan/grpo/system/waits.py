# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Pauses before new attempts, reminders of what is still awaited, and waits that cancellation cannot cut."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


async def wait_at_most(seconds: float, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def in_full(coroutine: Coroutine[Any, Any, None]) -> None:
    """Awaits ``coroutine`` to its end, even if cancelled. The coroutine must limit its own time."""
    task = asyncio.create_task(coroutine)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it is retrieved, and the cancellation goes on
        raise


class Backoff:
    """Pause after each of several failures in a row, doubling from the first to the longest."""

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        self._first_seconds, self._longest_seconds = first_seconds, longest_seconds
        self.num_failures = 0

    def seconds_after_failure(self) -> float:
        # The exponent is bounded, because a float overflows at 2 to the power of 1024.
        doublings = min(self.num_failures, 64)
        self.num_failures += 1
        return min(self._first_seconds * 2.0**doublings, self._longest_seconds)

    def reset(self) -> None:
        self.num_failures = 0


class Reminders:
    """Reminders at growing distances: by default after 5, 15, 35, 75 seconds, then each minute."""

    def __init__(self, first_seconds: float = 5.0, longest_seconds: float = 60.0) -> None:
        self._next = self._distance = first_seconds
        self._longest = longest_seconds

    def is_due(self, waited_seconds: float) -> bool:
        """Returns whether a reminder is due, which then counts as given."""
        if waited_seconds < self._next:
            return False
        self._distance = min(2 * self._distance, self._longest)
        self._next = waited_seconds + self._distance
        return True
