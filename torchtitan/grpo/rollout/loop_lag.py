# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How late the rollout process hears of what happens.

All of it is one event loop: while one task computes, answers of servers and commands of rank 0
wait. How long they do is measured as they feel it. A task sleeps a short interval and looks how
much too late it wakes, so each look is what an event at that moment would have waited. A loop
that stands still for longer than an interval is looked at once where many events would have
waited; the looks that were missed in between are counted as well, each shorter by an interval::

    interval 10 ms, woken 35 ms late  ->  35, 25, 15, 5 ms
"""

import asyncio
import time
from collections import deque

import numpy as np

_INTERVAL_SECONDS = 0.01
_WINDOW_SECONDS = 60.0


class LagWindow:
    """The last looks. Pure.

    Percentiles are over the whole window, since the time between two batches may hold too few
    looks for one; the longest is since it was last asked for, so that none is lost or told twice.

    Args:
        interval_seconds: Between two looks.
        window_seconds: What percentiles are over.
    """

    def __init__(self, interval_seconds: float, window_seconds: float) -> None:
        self._interval = interval_seconds
        self._lags: deque[float] = deque(maxlen=round(window_seconds / interval_seconds))
        self._longest = 0.0

    def add(self, late_seconds: float) -> None:
        """A look that came so much too late, and those that were missed for it."""
        late = max(late_seconds, 0.0)
        self._longest = max(self._longest, late)
        # More than the window holds would be written in vain.
        num_missed = min(int(late / self._interval), self._lags.maxlen or 0)
        self._lags.extend(late - missed * self._interval for missed in range(num_missed + 1))

    def take_metrics(self) -> dict[str, float]:
        """Median and 99th percentile over the window, and the longest since the last call."""
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
    """Watches the event loop that it runs in."""

    def __init__(self, interval_seconds: float = _INTERVAL_SECONDS) -> None:
        self._interval = interval_seconds
        self._window = LagWindow(interval_seconds, _WINDOW_SECONDS)

    async def run(self) -> None:
        """Looks for ever, a hundred times a second, some ten microseconds each."""
        while True:
            due = time.monotonic() + self._interval
            await asyncio.sleep(self._interval)
            self._window.add(time.monotonic() - due)

    def take_metrics(self) -> dict[str, float]:
        """See :meth:`LagWindow.take_metrics`; nothing before the first look."""
        return self._window.take_metrics()
