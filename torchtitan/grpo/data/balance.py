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
    (8 7 0) (6 0 0) (5 0 0) (4 0 0)              8 and 7 are in different parts
    (8 7 6) (5 0 0) (4 0 0)                      spread 2: no longer the widest
    (8 7 6) (5 4 0)                              ...
    (8 11 11)                                    4 with 7, 5 with 6, nothing with 8

If parts must have equal counts, each tuple at the start holds k things that follow each other in
order of cost, one in each part, so that every merge adds the same number of things to each part
(Michiels et al., "Performance ratios for the differencing method", 2003). The papers' complete
search is not implemented.

Differencing comes close to the mean only with many things in each part. Therefore swaps follow,
each of which makes the heaviest part lighter (:func:`even_out`).
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from itertools import combinations

import numpy as np

_Slot = tuple[float, int, int]
"""The sum of a part, and the first and last of its things, which form a linked list."""

_MAX_SWAPS, _MAX_BUNDLE_SWAPS = 256, 32
_MAX_GIVEN, _MAX_TAKEN = 256, 4096
"""Largest numbers of bundles that are tried against each other."""
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
        tolerance: Swapping ends once the heaviest part is at most this fraction above
            :func:`lower_bound`; with infinity nothing is swapped.

    Returns:
        The things of each part, as ascending indices into ``costs``, the lightest part first.
        With fewer things than parts some parts are empty.
    """
    values = _checked(costs, num_parts)
    parts = _differencing(values, num_parts, equal_counts)
    bound = lower_bound(values, num_parts) * (1 + tolerance)
    if max(sum(values[i] for i in part) for part in parts) > bound:
        part_of = np.empty(len(values), np.int64)
        for p, part in enumerate(parts):
            part_of[part] = p
        part_of = even_out(values, part_of, num_parts, bound=bound, may_move=not equal_counts)
        parts = [np.flatnonzero(part_of == p).tolist() for p in range(num_parts)]
    return sorted(
        (sorted(part) for part in parts), key=lambda part: (sum(values[i] for i in part), part)
    )


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
    its share of the other things. For each j, the j costliest things lie in q <= j parts.
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


def _checked(costs: Sequence[float], num_parts: int) -> list[float]:
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}.")
    values = np.asarray(costs, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        bad = [float(value) for value in values if not (np.isfinite(value) and value >= 0)]
        raise ValueError(f"Costs must be finite and at least 0, got {bad[0]}.")
    return values.tolist()


def _differencing(values: list[float], num_parts: int, equal_counts: bool) -> list[list[int]]:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    run = num_parts if equal_counts else 1
    following = [-1] * len(values)
    heap: list[tuple[float, int, list[_Slot]]] = []
    for start in range(0, len(order), run):
        # Ascending, without the zeros, which makes most tuples as short as a single sum.
        slots = [(values[i], i, i) for i in reversed(order[start : start + run])]
        heap.append((-_spread(slots, num_parts), start, sorted(slots)))
    heapq.heapify(heap)
    serial = len(order)  # Of two tuples with equal spreads the older one comes first.
    while len(heap) > 1:
        first = heapq.heappop(heap)[2]
        merged = _merge(first, heap[0][2], num_parts, following)
        heapq.heapreplace(heap, (-_spread(merged, num_parts), serial, merged))
        serial += 1
    slots = heap[0][2] if heap else []
    parts = [_linked(first, last, following) for _, first, last in slots]
    return [*([] for _ in range(num_parts - len(parts))), *parts]


def _spread(slots: list[_Slot], num_parts: int) -> float:
    return slots[-1][0] - (slots[0][0] if len(slots) == num_parts else 0.0)


def _merge(a: list[_Slot], b: list[_Slot], num_parts: int, following: list[int]) -> list[_Slot]:
    """Merges two tuples: largest sum with smallest sum, and so on. May modify both arguments."""
    if len(b) == 1:
        a, b = b, a
    if len(a) == 1:
        # By far the most frequent case is handled in place.
        slot = a[0]
        if len(b) == num_parts:
            slot = _join(b.pop(0), slot, following)
        insort(b, slot)
        return b
    overlap = max(len(a) + len(b) - num_parts, 0)
    joined = [_join(a[i], b[overlap - 1 - i], following) for i in range(overlap)]
    return sorted([*joined, *a[overlap:], *b[overlap:]])


def _join(a: _Slot, b: _Slot, following: list[int]) -> _Slot:
    following[a[2]] = b[1]
    return a[0] + b[0], a[1], b[2]


def _linked(first: int, last: int, following: list[int]) -> list[int]:
    things = [first]
    while things[-1] != last:
        things.append(following[things[-1]])
    return things


def even_out(
    costs: Sequence[float],
    row_of: np.ndarray,
    num_rows: int,
    *,
    part_of_row: np.ndarray | None = None,
    sizes: Sequence[int] | None = None,
    row_size: int = 0,
    bound: float = 0.0,
    may_move: bool = True,
    bundles: bool = False,
) -> np.ndarray:
    """Makes the heaviest part lighter by swaps, until no swap helps or ``bound`` is reached.

    A swap exchanges a thing of the heaviest part for a cheaper thing of another part, or for
    nothing, which moves it. The chosen swap makes the heavier of the two parts as light as
    possible. A part may consist of several rows, none of which may exceed ``row_size``.

    Args:
        costs: Cost of each thing, at least 0.
        row_of: [things] int, the row of each thing; the result is the same after the swaps.
        num_rows: Number of rows of all parts together.
        part_of_row: [num_rows] int, the part of each row; None if each row is a part.
        sizes: Size of each thing, at least 0; None if nothing takes room.
        row_size: Largest total size of the things of a row.
        bound: Cost of the heaviest part at which swapping ends.
        may_move: Whether the number of things in a row may change.
        bundles: Whether to try up to two things of one row for up to three of another, if no swap of
            single things helps. In full rows only such swaps exchange a long thing for several
            short ones.
    """
    parts = np.arange(num_rows) if part_of_row is None else np.asarray(part_of_row)
    state = _Split(costs, row_of, parts, sizes, row_size)
    num_bundles = _MAX_BUNDLE_SWAPS if bundles else 0
    for _ in range(_MAX_SWAPS):
        if state.sums.max() <= bound:
            break
        swap = state.best_swap(may_move)
        if swap is None and num_bundles > 0:
            num_bundles -= 1
            swap = state.best_bundle_swap()
        if swap is None:
            break
        state.apply(*swap)
    return state.row[: len(costs)]


class _Split:
    """The things of each row, the cost of each part and the room of each row.

    Each row has an empty thing of cost and size 0, numbered behind the real things. A move
    swaps a thing for the empty thing of its new row; the empty thing itself stays in its row.
    """

    def __init__(
        self,
        costs: Sequence[float],
        row_of: np.ndarray,
        parts: np.ndarray,
        sizes: Sequence[int] | None,
        row_size: int,
    ) -> None:
        self.num_things, num_rows = len(costs), len(parts)
        self.parts = parts
        self.cost = np.concatenate([np.asarray(costs, np.float64), np.zeros(num_rows)])
        self.size = np.zeros(len(self.cost), np.int64)
        if sizes is not None:
            self.size[: self.num_things] = sizes
        self.row = np.concatenate([np.asarray(row_of, np.int64), np.arange(num_rows)])
        taken = np.bincount(self.row, weights=self.size, minlength=num_rows)
        self.room = row_size - taken.astype(np.int64)
        self.sums = np.bincount(parts[self.row], weights=self.cost)

    def apply(self, given: Sequence[int], taken: Sequence[int]) -> None:
        """Exchanges things of one row for things of another; empty things stay."""
        source, target = self.row[given[0]], self.row[taken[0]]
        for things, begin, end in ((given, source, target), (taken, target, source)):
            for thing in things:
                if thing < self.num_things:
                    self.row[thing] = end
                    self.room[begin] += self.size[thing]
                    self.room[end] -= self.size[thing]
                    self.sums[self.parts[begin]] -= self.cost[thing]
                    self.sums[self.parts[end]] += self.cost[thing]

    def best_swap(self, may_move: bool) -> tuple[list[int], list[int]] | None:
        """The thing to give and the thing to take, or None if no swap helps."""
        heaviest = int(self.sums.argmax())
        part = self.parts[self.row]
        given = np.flatnonzero((part == heaviest) & (self.cost > 0))
        partners = np.arange(len(part) if may_move else self.num_things)
        lightest = np.zeros(len(self.sums), np.bool_)
        lightest[np.argsort(self.sums, kind="stable")[:_FEW_PARTS]] = True
        for few in (True, False):
            of_part = part[partners]
            taken = partners[(of_part != heaviest) & (lightest[of_part] == few)]
            best = self._best(given[:, None], taken[:, None])
            if best is not None:
                return best
        return None

    def best_bundle_swap(self) -> tuple[list[int], list[int]] | None:
        """The things to give and the things to take, or None if no such swap helps."""
        lightest = np.argsort(self.sums, kind="stable").tolist()
        heaviest = int(self.sums.argmax())
        given = self._bundles([heaviest], 2)[:_MAX_GIVEN]
        lightest.remove(heaviest)
        return self._best(given, self._bundles(lightest, 3)[:_MAX_TAKEN])

    def _bundles(self, of_parts: Sequence[int], most: int) -> np.ndarray:
        """[bundles, most], up to ``most`` things of a row, padded with its empty thing."""
        found: list[tuple[int, ...]] = []
        for part in of_parts:
            for row in np.flatnonzero(self.parts == part).tolist():
                nothing = self.num_things + row
                things = np.flatnonzero(self.row[: self.num_things] == row).tolist()
                found.append((nothing,) * most)
                for count in range(1, most + 1):
                    fill = (nothing,) * (most - count)
                    found += [(*chosen, *fill) for chosen in combinations(things, count)]
            if len(found) > _MAX_TAKEN:
                break
        return np.array(found, np.int64).reshape(-1, most)

    def _best(self, given: np.ndarray, taken: np.ndarray) -> tuple[list[int], list[int]] | None:
        """The best swap of a bundle in ``given`` [g, any] for one in ``taken`` [t, any], if any helps."""
        if not len(given) or not len(taken):
            return None
        source, target = self.row[given[:, 0]], self.row[taken[:, 0]]
        cheaper = self.cost[given].sum(1)[:, None] - self.cost[taken].sum(1)
        smaller = self.size[given].sum(1)[:, None] - self.size[taken].sum(1)
        heaviest = self.sums.max()
        heavier = np.maximum(heaviest - cheaper, self.sums[self.parts[target]] + cheaper)
        fits = (smaller <= self.room[target]) & (smaller >= -self.room[source][:, None])
        # Rounding alone must not count as an improvement: swapping would never end.
        better = np.where(fits & (heavier < heaviest * (1 - 1e-9)), heavier, np.inf)
        g, t = np.unravel_index(int(better.argmin()), better.shape)
        if not np.isfinite(better[g, t]):
            return None
        return given[g].tolist(), taken[t].tolist()
