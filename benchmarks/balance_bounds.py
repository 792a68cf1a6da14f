# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lower bounds of the cost of the costliest part."""

from collections.abc import Sequence

import numpy as np


def lower_bound(costs: Sequence[float], num_parts: int) -> float:
    """Returns a cost that the heaviest part of every split reaches or exceeds.

    It is the largest of these numbers: the mean of the parts; the largest thing; and, for each
    j, the least cost of j + 1 of the ``j * num_parts + 1`` largest things, because some part
    holds at least j + 1 of them.
    """
    ordered = sorted(costs, reverse=True)
    bound = max(sum(ordered) / num_parts, ordered[0] if ordered else 0.0)
    for j in range(1, (len(ordered) - 1) // num_parts + 1):
        last = j * num_parts
        bound = max(bound, sum(ordered[last - j : last + 1]))
    return bound


def lower_bound_with_sizes(
    costs: Sequence[float], sizes: Sequence[int], num_parts: int, part_size: int
) -> float:
    """Returns a lower bound as :func:`lower_bound` does, for parts of limited size.

    If the parts are almost full, a part with a thing that is costly for its size must also hold
    its portion of the other things. For each j, the j costliest things lie in q <= j parts.
    These parts hold at least what does not fit into the other parts; that is cheapest if it
    consists of the things with the least cost for their size, which the bound may cut into
    pieces. ``part_size`` is the largest total size of the things of a part.
    """
    bound = lower_bound(costs, num_parts)
    cost, size = np.asarray(costs, np.float64), np.asarray(sizes, np.float64)
    cheapest = np.argsort(cost / size, kind="stable")
    filled = np.concatenate([[0.0], np.cumsum(size[cheapest])])
    paid = np.concatenate([[0.0], np.cumsum(cost[cheapest])])
    costliest = np.argsort(-cost, kind="stable")[:num_parts]
    own_cost, own_size = np.cumsum(cost[costliest]), np.cumsum(size[costliest])
    for j in range(len(costliest)):
        q = np.arange(1, j + 2)
        rest = np.maximum(size.sum() - (num_parts - q) * part_size - own_size[j], 0)
        means = (own_cost[j] + np.interp(rest, filled, paid)) / q
        bound = max(bound, float(means.min()))
    return bound
