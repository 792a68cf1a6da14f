# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how long the servers are without work, and how long the trainer is the reason."""

import time
from collections.abc import Callable


class ShareClock:
    """Measures for which share of the time a condition holds.

    Args:
        now: Clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._holds = False
        self._held_seconds = 0.0
        self._begin = self._since = now()

    def set(self, holds: bool) -> None:
        """Records whether the condition holds from now on."""
        now = self._now()
        if self._holds:
            self._held_seconds += now - self._since
        self._holds, self._since = holds, now

    def take(self) -> float:
        """Returns the share of the time since the last call, in [0, 1]."""
        self.set(self._holds)
        elapsed = self._since - self._begin
        share = self._held_seconds / elapsed if elapsed > 0 else 0.0
        self._held_seconds, self._begin = 0.0, self._since
        return share


class IdleShares:
    """Shares of the time between two batches in which the servers could have done more.

    Args:
        now: Clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._idle = ShareClock(now)
        self._held_back = ShareClock(now)

    def note(self, *, is_idle: bool, is_held_back: bool) -> None:
        """Records the state from now on.

        Args:
            is_idle: Whether nothing is generated: no completion is in flight, or no server is ready.
            is_held_back: Whether a server with room gets no prompt because of the staleness bound
                or the full buffer, while the trainer is busy with an earlier batch.
        """
        self._idle.set(is_idle)
        self._held_back.set(is_held_back)

    def take_metrics(self) -> dict[str, float]:
        """Returns the shares since the last call."""
        return {
            "rollout/idle_fraction": self._idle.take(),
            "rollout/wait_trainer_fraction": self._held_back.take(),
        }
