# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Splits things of different costs into parts of even cost. The functions are pure.

This is the largest differencing method (Karmarkar and Karp, 1982,
https://www2.eecs.berkeley.edu/Pubs/TechRpts/1983/6353.html), for k parts as in Korf's
"Multi-Way Number Partitioning" (IJCAI 2009). The state is a heap of tuples of k sums, at first
one tuple ``(cost, 0, ..., 0)`` for each thing. In each turn the two tuples with the widest spread
(largest sum minus smallest sum) are merged into one: the largest sum of one tuple is joined with
the smallest sum of the other, and so on. The method ends when one tuple is left.

    3 parts of 8, 7, 6, 5, 4, as (sum, sum, sum):
    (8 0 0) (7 0 0) (6 0 0) (5 0 0) (4 0 0)
    (8 7 0) (6 0 0) (5 0 0) (4 0 0)              8 and 7 stand apart
    (8 7 6) (5 0 0) (4 0 0)                      spread 2: no longer the widest
    (8 7 6) (5 4 0)                              ...
    (8 11 11)                                    4 with 7, 5 with 6, nothing with 8

With equal counts each tuple at the start holds k things that follow each other in order of cost,
one in each part, so that every merge adds the same number of things to each part (Michiels et
al., "Performance ratios for the differencing method", 2003).

Differencing comes close to the mean only with many things in each part. With few things, swaps
follow, each of which makes the heaviest part lighter (:func:`even_out`).
"""

import heapq
from bisect import insort
from collections.abc import Sequence

import numpy as np

_Slot = tuple[float, tuple[int, ...]]
"""The sum of a part, and its things."""

_MAX_SWAPS = 256
_FEW_PARTS = 8
"""Number of the lightest parts in which the partner of a swap is searched first."""


def partition(
    costs: Sequence[float],
    num_parts: int,
    *,
    equal_counts: bool = False,
    tolerance: float = 1e-3,
) -> list[list[int]]:
    """Splits things into parts of about equal cost. Equal input gives equal output.

    Args:
        costs: Cost of each thing, finite and at least 0.
        num_parts: Number of parts, at least 1.
        equal_counts: Whether the numbers of things of two parts may differ by at most one.
        tolerance: Swapping ends once the heaviest part is at most this fraction above the mean.

    Returns:
        The things of each part, as ascending indices into ``costs``, the lightest part first.
        With fewer things than parts some parts are empty.
    """
    values = np.asarray(costs, np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        bad = values[~(np.isfinite(values) & (values >= 0))]
        raise ValueError(f"Costs must be finite and at least 0, got {bad[0]}.")
    part_of = np.zeros(len(values), np.int64)
    for number, part in enumerate(_differencing(values.tolist(), num_parts, equal_counts)):
        part_of[list(part)] = number
    part_of = even_out(
        values, part_of, np.arange(num_parts), tolerance=tolerance, may_move=not equal_counts
    )
    parts = [np.flatnonzero(part_of == number).tolist() for number in range(num_parts)]
    return sorted(parts, key=lambda part: (sum(costs[i] for i in part), part))


def _differencing(values: list[float], num_parts: int, equal_counts: bool) -> list[tuple[int, ...]]:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    run = num_parts if equal_counts else 1
    heap: list[tuple[float, int, list[_Slot]]] = []
    for start in range(0, len(order), run):
        # Ascending, without the zeros, which makes most tuples as short as a single sum.
        slots = sorted((values[i], (i,)) for i in order[start : start + run])
        heap.append((-_spread(slots, num_parts), start, slots))
    heapq.heapify(heap)
    serial = len(order)  # Of two tuples with equal spreads the older one comes first.
    while len(heap) > 1:
        first = heapq.heappop(heap)[2]
        merged = _merge(first, heap[0][2], num_parts)
        heapq.heapreplace(heap, (-_spread(merged, num_parts), serial, merged))
        serial += 1
    return [things for _, things in heap[0][2]] if heap else []


def _spread(slots: list[_Slot], num_parts: int) -> float:
    return slots[-1][0] - (slots[0][0] if len(slots) == num_parts else 0.0)


def _merge(a: list[_Slot], b: list[_Slot], num_parts: int) -> list[_Slot]:
    """Merges two tuples, largest with smallest; may change both arguments."""
    if len(b) == 1:
        a, b = b, a
    if len(a) == 1 and len(b) < num_parts:  # by far the most frequent case, in place
        insort(b, a[0])
        return b
    overlap = max(len(a) + len(b) - num_parts, 0)
    joined = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b[:overlap]), strict=False)]
    return sorted([*joined, *a[overlap:], *b[overlap:]])


def even_out(
    costs: Sequence[float] | np.ndarray,
    row_of: np.ndarray,
    part_of_row: np.ndarray,
    *,
    sizes: Sequence[int] | None = None,
    row_size: int = 0,
    tolerance: float = 0.0,
    may_move: bool = True,
) -> np.ndarray:
    """Makes the heaviest part lighter by swaps; returns [things] int, the new row of each thing.

    A swap exchanges a thing of the heaviest part for a cheaper thing of another part, or for
    nothing, which moves it. The chosen swap makes the heavier of the two parts as light as
    possible. A part may consist of several rows, none of which may exceed ``row_size``.

    Args:
        costs: Cost of each thing, at least 0.
        row_of: [things] int, the row of each thing.
        part_of_row: [rows] int, the part of each row.
        sizes: Size of each thing; None if nothing takes room.
        row_size: Largest total size of the things of a row.
        tolerance: Swapping ends once the heaviest part is at most this fraction above the mean.
        may_move: Whether the number of things in a row may change.
    """
    num_things, num_rows = len(costs), len(part_of_row)
    # Each row has an empty thing behind the real ones: a move swaps a thing for it.
    empty = np.arange(num_rows)
    cost = np.concatenate([np.asarray(costs, np.float64), np.zeros(num_rows)])
    size = np.zeros(len(cost), np.int64)
    if sizes is not None:
        size[:num_things] = sizes
    row = np.concatenate([row_of, empty])
    partners = np.arange(len(row) if may_move else num_things)
    for _ in range(_MAX_SWAPS):
        sums = np.bincount(part_of_row[row], weights=cost)
        if sums.max() <= sums.mean() * (1 + tolerance):
            break
        room = row_size - np.bincount(row, weights=size)
        swap = _best_swap(cost, size, row, part_of_row[row], partners, sums, room)
        if swap is None:
            break
        given, taken = swap
        row[given], row[taken] = row[taken], row[given]
        row[num_things:] = empty
    return row[:num_things]


def _best_swap(
    cost: np.ndarray,
    size: np.ndarray,
    row: np.ndarray,
    part: np.ndarray,
    partners: np.ndarray,
    sums: np.ndarray,
    room: np.ndarray,
) -> tuple[int, int] | None:
    """The thing to give and the thing to take, or None if no swap helps."""
    heaviest = int(sums.argmax())
    given = np.flatnonzero((part == heaviest) & (cost > 0))
    is_light = np.zeros(len(sums), np.bool_)
    is_light[np.argsort(sums, kind="stable")[:_FEW_PARTS]] = True
    for few in (True, False):
        of_part = part[partners]
        taken = partners[(of_part != heaviest) & (is_light[of_part] == few)]
        if not len(given) or not len(taken):
            continue
        cheaper = cost[given][:, None] - cost[taken]
        smaller = size[given][:, None] - size[taken]
        heavier = np.maximum(sums[heaviest] - cheaper, sums[part[taken]] + cheaper)
        fits = (smaller <= room[row[taken]]) & (smaller >= -room[row[given]][:, None])
        # Rounding alone must not count as an improvement: swapping would never end.
        better = np.where(fits & (heavier < sums[heaviest] * (1 - 1e-9)), heavier, np.inf)
        g, t = np.unravel_index(int(better.argmin()), better.shape)
        if np.isfinite(better[g, t]):
            return int(given[g]), int(taken[t])
    return None
