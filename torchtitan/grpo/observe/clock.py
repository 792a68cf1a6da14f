# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Times of one step after another, in seconds.

    A step lasts from the end of the one before to its own end, so that waiting for data
    and everything between two steps counts.
    """

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._last_end = time.perf_counter()

    def restart(self) -> None:
        """Begins a step now: what came before (an evaluation, say) belongs to none."""
        self._last_end = time.perf_counter()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the block's time to ``time/<part>_seconds``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - begin

    def end_step(self) -> dict[str, float]:
        """Closes the step; returns its times and begins the next."""
        now = time.perf_counter()
        times = {f"time/{part}_seconds": seconds for part, seconds in self._parts.items()}
        times["time/step_seconds"] = now - self._last_end
        self._parts.clear()
        self._last_end = now
        return times
