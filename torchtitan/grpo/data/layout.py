# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lays sequences out in the rows of ranks, so that groups share what they can. Pure functions.

Sequences of a group can share their context only within a row. They are therefore spread in *bundles*
of one group, which stay together. Large bundles save most, and small ones are easier to balance.
Bundles of a whole group, of half a group, and so on to single sequences are tried, and so are those
that arise if groups fill one row after the other. The layout with the fewest rows is chosen, and among
these the one whose costliest rank costs least. The search ends once both are as good as they can be.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from torchtitan.grpo.data.cost import SequenceCost
from torchtitan.grpo.data.packing import rows_per_rank
from torchtitan.grpo.data.rows import Sample
from torchtitan.grpo.data.shared_context import NO_GROUP, cost_of, num_computed, spans_of
from torchtitan.grpo.data.spread import (
    Spread,
    group_rows,
    rank_costs,
    spread_by_cost,
    spread_by_rows,
)

_EVEN = 1e-3
"""Ranks are balanced if the heaviest is at most this fraction above the mean."""


class _Bundle(NamedTuple):
    """Sequences of one group, by index, with their total tokens and cost if they share one row."""

    members: list[int]
    num_tokens: int
    cost: float


@dataclass(frozen=True)
class Layout:
    """How rows are laid out; see :func:`~torchtitan.grpo.data.step_plan.plan_step`."""

    num_ranks: int
    row_len: int
    local_batch_size: int
    row_bucket: int
    balance: bool
    cost: SequenceCost

    @property
    def _multiple(self) -> int:
        return self.local_batch_size * self.row_bucket or 1

    def spread(self, samples: Sequence[Sample], min_rows: int = 0) -> Spread:
        """Returns the rows of each rank, at least ``min_rows``; a row is a list of indices of ``samples``."""
        best, best_key, least = None, (0, 0.0), min_rows
        for bundles, is_whole in _bundlings(samples, self.row_len, self.cost):
            # Rows of a rank that hold all tokens, if rows can be full.
            full = -(-sum(bundle.num_tokens for bundle in bundles) // self.row_len)
            rows = rows_per_rank(full, self.num_ranks, self._multiple)
            if is_whole:  # no other bundles hold fewer tokens
                least = max(rows, min_rows)
            if best is not None and rows > best_key[0]:
                continue
            spread, costs = self._spread(bundles, min_rows)
            key = (len(spread[0]), max(costs))
            if best is None or key < best_key:
                best, best_key = spread, key
            if key[0] == least and key[1] <= (1 + _EVEN) * sum(costs) / len(costs):
                break
        assert best is not None, "each sequence by itself is a bundling"
        return best

    def rank_costs(self, spread: Spread, samples: Sequence[Sample]) -> list[float]:
        return [
            sum(cost_of(spans_of([samples[i] for i in row]), self.cost) for row in rows)
            for rows in spread
        ]

    def _spread(self, bundles: Sequence[_Bundle], min_rows: int) -> tuple[Spread, list[float]]:
        """Returns rows of sequences, and the cost of each rank."""
        lengths, costs = ([getattr(b, key) for b in bundles] for key in ("num_tokens", "cost"))
        shape = {
            "num_ranks": self.num_ranks,
            "row_len": self.row_len,
            "multiple": self._multiple,
            "min_rows": min_rows,
        }
        if self.balance:
            spread = spread_by_cost(lengths, costs, **shape)
            spread = [group_rows(rows, costs, self.local_batch_size) for rows in spread]
        else:
            spread = spread_by_rows(lengths, **shape)
        of_ranks = rank_costs(spread, costs)
        rows = [[[i for b in row for i in bundles[b].members] for row in rows] for rows in spread]
        return rows, of_ranks


def lay_out(
    minibatches: Sequence[Sequence[Sample]], layout: Layout
) -> tuple[Spread, dict[str, float]]:
    """Lays out each minibatch in rows of its own, equally many for every rank and every minibatch.

    Returns the rows of each rank, and metrics. The rows hold indices into all minibatches' samples together.
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


def _bundlings(
    samples: Sequence[Sample], row_len: int, cost: SequenceCost
) -> Iterator[tuple[list[_Bundle], bool]]:
    """Yields ways to bundle sequences, the largest bundles first.

    The flag says whether each bundle is a whole group, or as much of it as fits into a row.
    """

    @cache
    def bundle(members: tuple[int, ...]) -> _Bundle:
        spans = spans_of([samples[i] for i in members])
        return _Bundle(list(members), num_computed(spans), cost_of(spans, cost))

    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        key = sample.group if sample.group != NO_GROUP else -2 - index
        groups.setdefault(key, []).append(index)
    size = most = max((len(members) for members in groups.values()), default=1)
    last = None
    while size > 1:
        parts = [tuple(of[i : i + size]) for of in groups.values() for i in range(0, len(of), size)]
        found = [b for part in parts for b in _fitting(bundle, part, row_len)]
        if found != last:
            yield found, size == most
        if size == most:
            yield list(_in_line(bundle, [tuple(of) for of in groups.values()], row_len)), False
        last, size = found, -(-size // 2)
    yield [bundle((index,)) for index in range(len(samples))], most == 1


_Bundler = Callable[[tuple[int, ...]], _Bundle]


def _fitting(bundle: _Bundler, members: tuple[int, ...], row_len: int) -> Iterator[_Bundle]:
    """Yields a bundle, halved until each part fits into a row or is a single sequence."""
    whole = bundle(members)
    if len(members) == 1 or whole.num_tokens <= row_len:
        yield whole
        return
    half = len(members) // 2
    yield from _fitting(bundle, members[:half], row_len)
    yield from _fitting(bundle, members[half:], row_len)


def _in_line(
    bundle: _Bundler, groups: Sequence[tuple[int, ...]], row_len: int
) -> Iterator[_Bundle]:
    """Yields bundles that fill one row after the other. Groups are divided only at the end of a row."""
    free = row_len
    for rest in groups:
        while rest:
            count = len(rest)
            if bundle(rest).num_tokens > free:
                numbers = range(1, len(rest))
                count = bisect.bisect_right(
                    numbers, free, key=lambda n: bundle(rest[:n]).num_tokens
                )
            if count == 0 and free < row_len:
                free = row_len
                continue
            taken, rest = bundle(rest[: max(count, 1)]), rest[max(count, 1) :]
            free -= taken.num_tokens
            yield taken
