# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes from the number of a draw alone which of several sets the draw goes to.

The functions are pure. They use the divisor method of Sainte-Laguë, which apportions the seats
of a parliament to parties. Draw
``c`` (counted from 0) of a set of weight ``w`` has the key ``(2 c + 1) / w``. Draws are taken
in the order of their keys, and among equal keys in the order of the sets.

Invariants for K sets, where set ``i`` has the fraction ``s`` of the total weight, after ``p``
draws:

- The set was drawn ``p s`` times, within ``1/2 + K s / 2``.
- After each period, which is the sum of the weights reduced to the smallest integers, the count
  is exact.
- No draw depends on earlier draws. The counts after ``p`` draws are computed in K**2 steps, for
  any ``p``.

Example: weights 3 and 1 give the order A A B A, repeated forever.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Draw(NamedTuple):
    """Tells which set a draw goes to, and how many earlier draws went to that set."""

    set: int
    number: int


class Interleaving:
    """Computes the order in which prompts are drawn from several sets.

    Args:
        weights: A positive number for each set. The numbers are read as they are written in
            decimal, so that the weights 0.7 and 0.3 stand in the ratio of exactly 7 to 3.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        assert weights and all(w > 0 for w in weights), (
            f"each set needs a weight above 0, got {weights}"
        )
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        divisor = math.gcd(*integers)
        self.weights = [weight // divisor for weight in integers]
        self.period = sum(self.weights)
        # Keys with a common denominator are integers, which compare exactly.
        common = math.lcm(*self.weights)
        self._steps = [common // weight for weight in self.weights]

    def at(self, position: int) -> Draw:
        """Returns the draw that follows the first ``position`` draws."""
        counts = self.counts(position)
        next_set = self._next_set(counts)
        return Draw(next_set, counts[next_set])

    def counts(self, position: int) -> list[int]:
        """Returns how often each set is drawn from in the first ``position`` draws."""
        # Between the last key taken and the first key not taken lies a T with
        # |count - T w / 2| <= 1/2 for every set. The sum over the sets bounds T, and so gives a
        # lower bound of each count, from which at most one draw per set is missing.
        shift = 2 * position - len(self.weights)
        counts = [
            max(0, -((self.period - weight * shift) // (2 * self.period)))
            for weight in self.weights
        ]
        for _ in range(position - sum(counts)):
            counts[self._next_set(counts)] += 1
        return counts

    def _next_set(self, counts: list[int]) -> int:
        keys = [(2 * count + 1) * step for count, step in zip(counts, self._steps, strict=True)]
        return keys.index(min(keys))
