# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Splits things of different costs into parts of even cost. Pure; imports nothing of the rest.

The largest differencing method (Karmarkar and Karp, 1982,
https://www2.eecs.berkeley.edu/Pubs/TechRpts/1983/6353.html), for k parts as in Korf's
"Multi-Way Number Partitioning" (IJCAI 2009): the state is a heap of tuples of k sums, at
first one for each thing, ``(cost, 0, ..., 0)``. The two tuples of the widest spread (largest
sum less smallest) become one, in which the largest sum of the one is joined with the smallest
of the other and so on, until a single tuple is left.

    3 parts of 8, 7, 6, 5, 4, as (sum, sum, sum):
    (8 0 0) (7 0 0) (6 0 0) (5 0 0) (4 0 0)
    (8 7 0) (6 0 0) (5 0 0) (4 0 0)              8 and 7 stand apart
    (8 7 6) (5 0 0) (4 0 0)                      spread 2: no longer the widest
    (8 7 6) (5 4 0)                              ...
    (8 11 11)                                    4 with 7, 5 with 6, nothing with 8

With equal counts the tuples at the start are runs of k things in order of their cost, one in
each part, so that every merge adds as many things to each part (Michiels et al., "Performance
ratios for the differencing method", 2003). Not kept of the papers: the complete search.

Differencing needs many things a part to end near the mean. With few of them swaps follow, one
at a time, each of which makes the heaviest part lighter (:func:`even_out`).
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from itertools import combinations

import numpy as np

_Slot = tuple[float, int, int]
"""One part's sum, its first and its last thing; in between they are linked."""

_MAX_SWAPS, _MAX_BUNDLE_SWAPS = 256, 32
_MAX_GIVEN, _MAX_TAKEN = 256, 4096
"""Bundles that are tried against each other."""
_FEW_PARTS = 8
"""Partners of a swap are looked for in so many of the lightest parts before all others."""


def partition(
    costs: Sequence[float],
    num_parts: int,
    *,
    equal_counts: bool = False,
    tolerance: float = 1e-3,
) -> list[list[int]]:
    """Splits things into parts of about equal cost.

    Equal input gives equal output.

    Args:
        costs: Of each thing, finite and at least 0.
        num_parts: At least 1.
        equal_counts: The parts' counts differ by one at most.
        tolerance: Swapping ends where the heaviest part is at most this fraction above
            :func:`lower_bound`; infinity swaps nothing.

    Returns:
        For each part its things, as ascending indices into ``costs``; the lightest part
        first. With fewer things than parts some are empty.

    Raises:
        ValueError: There is no part to fill, or a cost is negative or not finite.
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
    """A cost below which no split has its heaviest part.

    The largest of: the mean of the parts; the largest thing; and for each count j the
    least cost of j + 1 of the ``j * num_parts + 1`` largest things, since so many of them
    meet in some part.
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
    """As :func:`lower_bound`, where a part has room for ``part_size`` alone.

    Where parts are almost full, one that holds a large thing of much cost for its size has to
    hold as much of the rest as others do. For each count j the j costliest things lie in some
    q <= j parts, which hold at least what does not fit into the others: at best, of all things
    (also in pieces) those of the least cost for their size.

    Args:
        costs: Of each thing, at least 0.
        sizes: Of each thing, at least 1.
        num_parts: At least 1.
        part_size: What the sizes of a part's things may add up to.
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
        # Ascending, and without the zeros: a tuple of one sum costs nothing to carry about.
        slots = [(values[i], i, i) for i in reversed(order[start : start + run])]
        heap.append((-_spread(slots, num_parts), start, sorted(slots)))
    heapq.heapify(heap)
    serial = len(order)  # the older of two equal spreads goes first
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
    """One tuple of two, largest with smallest; both may be changed."""
    if len(b) == 1:
        a, b = b, a
    if len(a) == 1:
        # The usual case by far, in place.
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
    """Makes the heaviest part lighter, swap by swap, until none helps or ``bound`` is met.

    A swap exchanges a thing of the heaviest part for a cheaper one of another part, or for
    nothing (a move), such that the heavier of the two is as light as can be. Parts may have
    rows, none of which may become larger than ``row_size``.

    Args:
        costs: Of each thing, at least 0.
        row_of: [things] int, each thing's row.
        num_rows: Of all parts together.
        part_of_row: [num_rows] int, each row's part; None: each row is a part.
        sizes: Of each thing, at least 0; None: nothing takes room.
        row_size: What the sizes of a row's things may add up to.
        bound: A heaviest part of at most this cost is good enough.
        may_move: False keeps the rows' counts as they are.
        bundles: Where no swap of single things helps, also try two for up to three, of one
            row each: full rows take one long thing for several short ones alone.

    Returns:
        [things] int, each thing's row after that.
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
    """Things in rows in parts, and what each part costs and each row has room for.

    Behind the things stands a nothing of no cost for each row, which swaps for what moves
    there and which itself stays where it is.
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
        """Exchanges things of one row for things of another; both may have nothings."""
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
        """The thing to give and the one to take, or None where no swap helps."""
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
        """Some things to give and some to take, or None where no such swap helps."""
        lightest = np.argsort(self.sums, kind="stable").tolist()
        heaviest = int(self.sums.argmax())
        given = self._bundles([heaviest], 2)[:_MAX_GIVEN]
        lightest.remove(heaviest)
        return self._best(given, self._bundles(lightest, 3)[:_MAX_TAKEN])

    def _bundles(self, of_parts: Sequence[int], most: int) -> np.ndarray:
        """[bundles, most] up to ``most`` things of a row, filled up with the row's nothing."""
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
        """given: [g, any], taken: [t, any] bundles of one row each; the best two, if any."""
        if not len(given) or not len(taken):
            return None
        source, target = self.row[given[:, 0]], self.row[taken[:, 0]]
        cheaper = self.cost[given].sum(1)[:, None] - self.cost[taken].sum(1)
        smaller = self.size[given].sum(1)[:, None] - self.size[taken].sum(1)
        heaviest = self.sums.max()
        heavier = np.maximum(heaviest - cheaper, self.sums[self.parts[target]] + cheaper)
        fits = (smaller <= self.room[target]) & (smaller >= -self.room[source][:, None])
        # By more than what rounding makes of it, or it would go on for ever.
        better = np.where(fits & (heavier < heaviest * (1 - 1e-9)), heavier, np.inf)
        g, t = np.unravel_index(int(better.argmin()), better.shape)
        if not np.isfinite(better[g, t]):
            return None
        return given[g].tolist(), taken[t].tolist()
