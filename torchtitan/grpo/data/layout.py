# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lays sequences out in the rows of ranks, so that groups share what they can. Pure functions.

Sequences of one group share their context only in one row. They are therefore spread in *bundles*
of one group, which stay together. Large bundles save most, and small ones are easier to balance:
bundles of a whole group, of half a group, and so on to single sequences are tried, as are those that
arise if groups fill rows one after the other. The fewest rows are taken, and among these the lightest
heaviest rank; the search ends once both are as good as they can be.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan.grpo.data.cost import SequenceCost
from torchtitan.grpo.data.packing import rows_per_rank
from torchtitan.grpo.data.rows import Sample
from torchtitan.grpo.data.shared_context import NO_GROUP, cost_of, num_computed, spans_of
from torchtitan.grpo.data.spread import Spread, group_rows, spread_by_cost, spread_by_rows

_EVEN = 1e-3
"""Ranks are balanced if the heaviest is at most this fraction above the mean."""

_Bundle = list[int]
"""Indices of sequences of one group, which fit into a row together."""


@dataclass(frozen=True)
class Layout:
    """How rows are laid out; see :func:`~torchtitan.grpo.data.step_plan.plan_step`."""

    num_ranks: int
    row_len: int
    local_batch_size: int
    row_bucket: int
    balance: bool
    cost: SequenceCost

    def spread(self, samples: Sequence[Sample], min_rows: int = 0) -> Spread:
        """For each rank its rows, each a list of indices of ``samples``; at least ``min_rows``."""
        least = max(self._least_rows(samples, [list(range(len(samples)))]), min_rows)
        best, best_key = None, (0, 0.0)
        for bundles in _bundlings(samples, self.row_len):
            if best is not None and self._least_rows(samples, bundles) > best_key[0]:
                continue
            spread = self._spread(samples, bundles, min_rows)
            costs = self.rank_costs(spread, samples)
            key = (len(spread[0]), max(costs))
            if best is None or key < best_key:
                best, best_key = spread, key
            if key[0] == least and key[1] <= (1 + _EVEN) * sum(costs) / len(costs):
                break
        assert best is not None, "each sequence by itself is a bundling"
        return best

    def _least_rows(self, samples: Sequence[Sample], bundles: Sequence[_Bundle]) -> int:
        """Rows of a rank that hold the tokens of bundles, if rows can be full."""
        rows = -(-sum(_num_tokens(samples, bundle) for bundle in bundles) // self.row_len)
        return rows_per_rank(rows, self.num_ranks, self.local_batch_size * self.row_bucket)

    def rank_costs(self, spread: Spread, samples: Sequence[Sample]) -> list[float]:
        return [
            sum(cost_of(spans_of([samples[i] for i in row]), self.cost) for row in rows)
            for rows in spread
        ]

    def _spread(
        self, samples: Sequence[Sample], bundles: Sequence[_Bundle], min_rows: int
    ) -> Spread:
        spans = [spans_of([samples[i] for i in bundle]) for bundle in bundles]
        lengths = [num_computed(of_bundle) for of_bundle in spans]
        shape = {
            "num_ranks": self.num_ranks,
            "row_len": self.row_len,
            "multiple": self.local_batch_size * self.row_bucket,
            "min_rows": min_rows,
        }
        if self.balance:
            costs = [cost_of(of_bundle, self.cost) for of_bundle in spans]
            spread = spread_by_cost(lengths, costs, **shape)
            spread = [group_rows(rows, costs, self.local_batch_size) for rows in spread]
        else:
            spread = spread_by_rows(lengths, **shape)
        return [[[i for b in row for i in bundles[b]] for row in rows] for rows in spread]


def lay_out(
    minibatches: Sequence[Sequence[Sample]], layout: Layout
) -> tuple[Spread, dict[str, float]]:
    """Lays out each minibatch in separate rows, the same number on each rank and in each.

    Returns the rows of each rank, whose indices count through all minibatches, and metrics.
    """
    spreads = [layout.spread(samples) for samples in minibatches]
    per_rank = max(len(spread[0]) for spread in spreads)
    # Minibatches that need fewer rows are spread again: more rows allow a better balance.
    spreads = [
        spread if len(spread[0]) == per_rank else layout.spread(samples, min_rows=per_rank)
        for spread, samples in zip(spreads, minibatches, strict=True)
    ]
    heaviest = mean = 0.0
    rows_of_rank: Spread = [[] for _ in range(layout.num_ranks)]
    offset = 0
    for spread, samples in zip(spreads, minibatches, strict=True):
        costs = layout.rank_costs(spread, samples)
        heaviest, mean = heaviest + max(costs), mean + sum(costs) / len(costs)
        for of_rank, rows in zip(rows_of_rank, spread, strict=True):
            of_rank += [[offset + i for i in row] for row in rows]
        offset += len(samples)
    return rows_of_rank, {
        "data/max_over_mean_cost": heaviest / mean if mean > 0 else 1.0,
        "data/rows_per_rank": float(per_rank * len(minibatches)),
    }


def _bundlings(samples: Sequence[Sample], row_len: int) -> Iterator[list[_Bundle]]:
    """Yields ways to bundle sequences, the largest bundles first."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group if sample.group != NO_GROUP else -2 - index, []).append(
            index
        )
    size = most = max((len(members) for members in groups.values()), default=1)
    last = None
    while size > 1:
        parts = [of[i : i + size] for of in groups.values() for i in range(0, len(of), size)]
        bundles = [bundle for part in parts for bundle in _fitting(samples, part, row_len)]
        if bundles != last:
            yield bundles
        if size == most:
            yield list(_in_line(samples, list(groups.values()), row_len))
        last, size = bundles, -(-size // 2)
    yield [[index] for index in range(len(samples))]


def _fitting(samples: Sequence[Sample], members: _Bundle, row_len: int) -> Iterator[_Bundle]:
    """Halves a bundle until it fits into a row, or is a single sequence."""
    if len(members) == 1 or _num_tokens(samples, members) <= row_len:
        yield members
        return
    half = len(members) // 2
    yield from _fitting(samples, members[:half], row_len)
    yield from _fitting(samples, members[half:], row_len)


def _in_line(
    samples: Sequence[Sample], groups: Sequence[_Bundle], row_len: int
) -> Iterator[_Bundle]:
    """Fills rows with groups, which are divided only where a row ends."""
    free = row_len
    for rest in groups:
        while rest:
            count = bisect.bisect_right(
                range(1, len(rest) + 1), free, key=lambda n: _num_tokens(samples, rest[:n])
            )
            if count == 0 and free < row_len:
                free = row_len
                continue
            bundle, rest = rest[: max(count, 1)], rest[max(count, 1) :]
            free -= _num_tokens(samples, bundle)
            yield bundle


def _num_tokens(samples: Sequence[Sample], bundle: _Bundle) -> int:
    return num_computed(spans_of([samples[i] for i in bundle]))
