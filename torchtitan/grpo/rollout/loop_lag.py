# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how late the event loop of the rollout process reacts.

The process runs in one event loop. While one task computes, answers from servers and commands
from rank 0 wait. The measurement sees the same delay as they do: a task sleeps for a short
interval and records how late it wakes up, which is the delay of any event at that moment. A
blocked loop wakes the task once, although many events would have waited in the meantime. The
measurements that were missed are therefore added, each one interval shorter than the other::

    interval 10 ms, woken 35 ms late  ->  35, 25, 15, 5 ms
"""

import asyncio
import time
from collections import deque

import numpy as np

_INTERVAL_SECONDS = 0.01
_WINDOW_SECONDS = 60.0


class LagWindow:
    """The most recent measurements.

    Percentiles cover the whole window, because the time between two batches may hold too few
    measurements. The maximum covers the time since it was last read, so that each maximum is
    reported exactly once.

    Args:
        interval_seconds: Time between two measurements.
        window_seconds: Time that the percentiles cover.
    """

    def __init__(self, interval_seconds: float, window_seconds: float) -> None:
        self._interval = interval_seconds
        self._lags: deque[float] = deque(maxlen=round(window_seconds / interval_seconds))
        self._longest = 0.0

    def add(self, late_seconds: float) -> None:
        """Adds one measured delay, and the measurements that were missed because of it."""
        late = max(late_seconds, 0.0)
        self._longest = max(self._longest, late)
        # Measurements beyond the size of the window would be dropped anyway.
        num_missed = min(int(late / self._interval), self._lags.maxlen or 0)
        self._lags.extend(late - missed * self._interval for missed in range(num_missed + 1))

    def take_metrics(self) -> dict[str, float]:
        """Returns the percentiles of the window and the maximum since the last call."""
        longest, self._longest = self._longest, 0.0
        if not self._lags:
            return {}
        median, high = np.percentile(self._lags, (50, 99))
        return {
            "rollout/loop_lag_p50_ms": float(median) * 1e3,
            "rollout/loop_lag_p99_ms": float(high) * 1e3,
            "rollout/loop_lag_max_ms": longest * 1e3,
        }


class LoopLag:
    """Measures the delay of the event loop that runs it."""

    def __init__(self, interval_seconds: float = _INTERVAL_SECONDS) -> None:
        self._interval = interval_seconds
        self._window = LagWindow(interval_seconds, _WINDOW_SECONDS)

    async def run(self) -> None:
        """Measures forever, 100 times per second. One measurement takes about 10 microseconds."""
        while True:
            due = time.monotonic() + self._interval
            await asyncio.sleep(self._interval)
            self._window.add(time.monotonic() - due)

    def take_metrics(self) -> dict[str, float]:
        """Returns :meth:`LagWindow.take_metrics`, empty before the first measurement."""
        return self._window.take_metrics()
