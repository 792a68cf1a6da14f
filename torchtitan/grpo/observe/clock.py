# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how long the parts of a step take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Measures the time of each step and of its parts, in seconds.

    A step lasts from the end of the previous step to its own end, and so includes waiting for
    data and everything else between two steps.
    """

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._begin = self._last_end = time.perf_counter()

    def restart(self) -> None:
        """Starts a step now. Time since the last step, such as an evaluation, is not counted."""
        self._last_end = time.perf_counter()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the duration of the block to ``time/<part>_seconds``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - begin

    def end_step(self) -> dict[str, float]:
        """Ends the step, returns its times, and starts the next step."""
        now = time.perf_counter()
        step_seconds = now - self._last_end
        times = {f"time/{part}_seconds": seconds for part, seconds in self._parts.items()}
        times["time/step_seconds"] = step_seconds
        times["time/elapsed_seconds"] = now - self._begin
        waited = self._parts.get("wait_data", 0.0)
        times["time/wait_data_fraction"] = min(waited / step_seconds, 1.0)
        self._parts.clear()
        self._last_end = now
        return times
