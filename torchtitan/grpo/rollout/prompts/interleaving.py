# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which of several sets a draw goes to, from the draw's number alone. Pure.

The divisor method of Sainte-Laguë, which apportions seats to parties: draw ``c`` (from 0) of a
set of weight ``w`` has the key ``(2 c + 1) / w``, and draws are taken in the order of their keys,
of equal ones the first set's.

Invariants, for K sets of shares ``s`` after any number of draws ``p``:

- a set was drawn from ``p s`` times, give or take ``1/2 + K s / 2``;
- after each period, which is the sum of the weights brought to the smallest integers, exactly;
- no draw needs those before it: what was drawn until ``p`` costs K**2 steps, however large p is.

Example: weights 3 and 1 give the order A A B A, again and again.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Draw(NamedTuple):
    """One draw: the set, and how many draws of that set were before."""

    set: int
    number: int


class Interleaving:
    """The order in which sets are drawn from.

    Args:
        weights: One number above 0 for each set. Read as they are written in decimal, so
            that 0.7 and 0.3 are 7 to 3.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        assert weights and all(w > 0 for w in weights), f"weights above 0 needed, got {weights}"
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        divisor = math.gcd(*integers)
        self.weights = [weight // divisor for weight in integers]
        self.period = sum(self.weights)
        # Keys on a common denominator: whole numbers, of which no two are mistaken as equal.
        common = math.lcm(*self.weights)
        self._steps = [common // weight for weight in self.weights]

    def at(self, position: int) -> Draw:
        """The draw after ``position`` others."""
        counts = self.counts(position)
        next_set = self._next_set(counts)
        return Draw(next_set, counts[next_set])

    def counts(self, position: int) -> list[int]:
        """How often each set is drawn from in the first ``position`` draws."""
        # Between the last key that is in and the first that is out lies a T with
        # |count - T w / 2| <= 1/2 for every set. Their sum gives T, and so a bound of each
        # count from below, from which at most a draw a set is missing.
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
