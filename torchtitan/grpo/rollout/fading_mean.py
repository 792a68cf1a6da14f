# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause


class FadingMean:
    """An exponentially weighted mean. Each value has ``fade`` times the weight of the value after it."""

    def __init__(self, fade: float) -> None:
        self.value = 0.0
        self.gain = 1.0
        self._fade = fade
        self._weight = 0.0

    def add(self, value: float) -> None:
        self._weight = self._fade * self._weight + 1.0
        self.gain = 1.0 / self._weight
        self.value += self.gain * (value - self.value)
