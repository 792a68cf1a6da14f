# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which rank trains on which sequences, in which rows. The functions are pure.

Invariants: every sequence stands in one row of one rank; no row is longer than ``row_len``;
every rank has the same number of rows, a multiple of ``multiple``; equal input gives equal
output.

One more row costs every rank a row, mostly of padding. To have few rows is therefore more important
than a good balance. For each number of rows, from the lower bound upwards, until one fits:

1. Split the sequences into parts of even cost, one for each rank, and pack each part into rows.
   Split by cost only, and if that does not fit, with equal counts: each rank then has sequences of
   all lengths, which evens out tokens as well.
2. If some part does not fit, pack all sequences into rows, either of even tokens or as full as
   possible, and deal the rows to ranks so that costs are even. Then swap sequences as long as the
   heaviest rank becomes lighter and no row becomes too long.
"""

import math
from collections.abc import Sequence

import numpy as np

from torchtitan.grpo.data.balance import even_out, lower_bound_with_sizes, partition
from torchtitan.grpo.data.packing import (
    check_lengths,
    deal_rows,
    fewest_rows,
    fill_rows,
    pack_into,
    pack_rows,
    rows_per_rank,
)

Spread = list[list[list[int]]]
"""For each rank its rows, each a list of indices of sequences."""

_EVEN_RANKS = 1e-3
"""Ranks whose costs differ by at most this fraction are not evened out further."""


def spread_by_cost(
    lengths: Sequence[int],
    costs: Sequence[float],
    *,
    num_ranks: int,
    row_len: int,
    multiple: int,
    min_rows: int = 0,
) -> Spread:
    """Spreads sequences over ranks by cost, in as few rows as they can be packed into.

    The rank with the least cost comes first. A ``ValueError`` says that a sequence does not fit
    into a row, or that a cost is negative or not finite.

    Args:
        lengths: Number of tokens of each sequence, in [1, row_len].
        costs: Cost of each sequence, finite and at least 0.
        num_ranks: Data-parallel degree.
        row_len: Number of tokens of a row.
        multiple: Divisor of the number of rows of each rank.
        min_rows: Smallest number of rows of each rank; a multiple of ``multiple``.
    """
    check_lengths(lengths, row_len)
    per_rank = max(rows_per_rank(fewest_rows(lengths, row_len), num_ranks, multiple), min_rows)
    while True:
        spread = _ranks_first(lengths, costs, num_ranks, per_rank, row_len)
        if spread is None:
            spread = _rows_first(lengths, costs, num_ranks, per_rank, row_len)
        if spread is not None:
            return spread
        per_rank += multiple


def spread_by_rows(
    lengths: Sequence[int], *, num_ranks: int, row_len: int, multiple: int, min_rows: int = 0
) -> Spread:
    """Packs all sequences into rows, then deals the rows to ranks in snake order of their tokens.

    The arguments and the result are those of :func:`spread_by_cost`.
    """
    rows = pack_rows(lengths, row_len)
    per_rank = max(rows_per_rank(len(rows), num_ranks, multiple), min_rows)
    row_tokens = [sum(lengths[i] for i in row) for row in rows]
    dealt = deal_rows(row_tokens, num_ranks, per_rank)
    return [[rows[row] if row is not None else [] for row in hand] for hand in dealt]


def group_rows(rows: list[list[int]], costs: Sequence[float], size: int) -> list[list[int]]:
    """Orders a rank's rows so that microbatches of ``size`` consecutive rows have even costs.

    The heaviest microbatch sets the pace of a pipeline. Every rank begins with its heaviest
    microbatch, because ranks wait for each other in each microbatch. If the last microbatch has
    fewer rows, these are the lightest ones.
    """
    row_costs = [sum(costs[i] for i in row) for row in rows]
    if len(rows) % size:
        return [rows[i] for i in sorted(range(len(rows)), key=lambda i: -row_costs[i])]
    groups = partition(row_costs, len(rows) // size, equal_counts=True)
    return [rows[i] for group in reversed(groups) for i in group]


def rank_costs(spread: Spread, costs: Sequence[float]) -> list[float]:
    return [sum(costs[i] for row in rows for i in row) for rows in spread]


def _ranks_first(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, per_rank: int, row_len: int
) -> Spread | None:
    for equal_counts in (False, True):
        parts = partition(costs, num_ranks, equal_counts=equal_counts, tolerance=_EVEN_RANKS)
        if any(sum(lengths[i] for i in part) > per_rank * row_len for part in parts):
            continue  # Nothing is packed if one part cannot fit.
        spread: Spread = []
        for part in parts:
            rows = pack_into(
                [lengths[i] for i in part], [costs[i] for i in part], per_rank, row_len
            )
            if rows is None:
                break
            spread.append([[part[i] for i in row] for row in rows])
        else:
            return spread
    return None


def _rows_first(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, per_rank: int, row_len: int
) -> Spread | None:
    def fits(rows: list[list[int]]) -> bool:
        return len(rows) <= num_ranks * per_rank and all(
            sum(lengths[i] for i in row) <= row_len for row in rows
        )

    # Rows of even tokens are similar to each other. Full rows are not: some hold the long
    # sequences and others the short ones, so that each rank can be dealt some of both.
    even = partition(lengths, num_ranks * per_rank, tolerance=math.inf)
    packings = list(filter(fits, [even, fill_rows(lengths, row_len)]))
    packings = packings or list(filter(fits, [pack_rows(lengths, row_len)]))
    if not packings:
        return None
    found = [_dealt_by_cost(rows, costs, num_ranks, per_rank) for rows in packings]
    spread = min(found, key=lambda spread: max(rank_costs(spread, costs)))
    return _evened_out(spread, lengths, costs, row_len)


def _dealt_by_cost(
    rows: list[list[int]], costs: Sequence[float], num_ranks: int, per_rank: int
) -> Spread:
    rows = [*rows, *([] for _ in range(num_ranks * per_rank - len(rows)))]
    hands = partition([sum(costs[i] for i in row) for row in rows], num_ranks, equal_counts=True)
    return [[rows[row] for row in hand] for hand in hands]


def _evened_out(
    spread: Spread, lengths: Sequence[int], costs: Sequence[float], row_len: int
) -> Spread:
    num_ranks, per_rank = len(spread), len(spread[0])
    row_of = np.empty(len(lengths), np.int64)
    for r, row in enumerate(row for rows in spread for row in rows):
        row_of[row] = r
    bound = lower_bound_with_sizes(costs, lengths, num_ranks, per_rank * row_len)
    row_of = even_out(
        costs,
        row_of,
        num_ranks * per_rank,
        part_of_row=np.arange(num_ranks * per_rank) // per_rank,
        sizes=lengths,
        row_size=row_len,
        bound=bound * (1 + _EVEN_RANKS),
        bundles=True,
    )
    rows = [np.flatnonzero(row_of == r).tolist() for r in range(num_ranks * per_rank)]
    spread = [rows[r : r + per_rank] for r in range(0, len(rows), per_rank)]
    return sorted(spread, key=lambda rows: sum(costs[i] for row in rows for i in row))
