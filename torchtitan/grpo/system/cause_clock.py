# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Divides time among causes, so that the seconds of all causes add up to the time that has passed."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class CauseClock:
    """Counts the seconds of each cause. At every moment exactly one ``cause`` is counted.

    One thread uses a clock.
    """

    def __init__(self, cause: str = "", now: Callable[[], float] = time.monotonic) -> None:
        self.cause, self._now = cause, now
        self._since = now()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, cause: str) -> None:
        now = self._now()
        self._seconds[self.cause] += now - self._since
        self.cause, self._since = cause, now

    @contextmanager
    def within(self, cause: str) -> Iterator[None]:
        """Counts ``cause`` during the context, and then the former cause again."""
        former = self.cause
        self.enter(cause)
        try:
            yield
        finally:
            self.enter(former)

    def move(self, seconds: float, source: str, target: str) -> float:
        """Moves at most ``seconds`` from one cause to another. Returns how many were left to move."""
        self.enter(self.cause)
        moved = min(seconds, self._seconds[source])
        self._seconds[source] -= moved
        self._seconds[target] += moved
        return seconds - moved

    def divide(self, source: str, weights: Mapping[str, float]) -> None:
        """Divides the seconds of a cause among others in proportion to ``weights``, if any is above 0."""
        self.enter(self.cause)
        if (total := sum(weights.values())) > 0:
            seconds = self._seconds.pop(source, 0.0)
            for cause, weight in weights.items():
                self._seconds[cause] += seconds * weight / total

    def take(self) -> dict[str, float]:
        """Returns the seconds of each cause since the last call. Their sum is the time since then."""
        self.enter(self.cause)
        taken, self._seconds = self._seconds, defaultdict(float)
        return dict(taken)
