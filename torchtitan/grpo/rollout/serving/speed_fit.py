# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Fits measured durations as sums of costs, such as seconds per request and per token."""

from collections.abc import Sequence

import numpy as np

_FEWEST = 16


class SpeedFit:
    """Fits ``seconds = sum(cost * amount)`` by least squares, with costs of at least 0.

    ``doubts`` holds a ridge penalty for each cost: amounts that vary too little cannot tell costs
    apart. With 1e-3, a cost counts once its amount varies by several percent. With 0, it always counts.
    """

    def __init__(self, doubts: Sequence[float]) -> None:
        size = len(doubts)
        self.number = 0
        self._doubts = np.diag(np.maximum(doubts, 1e-9))
        self._moments, self._products = np.zeros((size, size)), np.zeros(size)

    def add(self, amounts: Sequence[float], seconds: float) -> None:
        values = np.asarray(amounts, float)
        self.number += 1
        self._moments += np.outer(values, values)
        self._products += seconds * values

    def costs(self, fewest: int = _FEWEST) -> list[float] | None:
        """Returns the seconds per unit of each amount, or ``None`` before ``fewest`` durations were added."""
        if self.number < max(1, fewest):
            return None
        scales = np.sqrt(np.diag(self._moments) / self.number)
        used = [index for index, scale in enumerate(scales) if scale > 0]
        found = np.zeros(len(scales))
        while used:
            part = np.ix_(used, used)
            unit = scales[used]
            moments = self._moments[part] / np.outer(unit, unit) / self.number
            products = self._products[used] / unit / self.number
            solved = np.linalg.solve(moments + self._doubts[part], products) / unit
            if (solved >= 0).all():
                found[used] = solved
                break
            used.pop(int(np.argmin(solved * unit)))
        return found.tolist()
