# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which rank trains on which sequences, in which rows. The functions are pure.

Invariants: every sequence stands in one row of one rank; no row is longer than ``row_len``;
every rank has the same number of rows, a multiple of ``multiple``; equal input gives equal
output.

One more row costs every rank a row, mostly of padding, so that few rows come before a good
balance. For each number of rows, from the lower bound upwards:

1. Split the sequences into parts of even cost, one for each rank, and pack each part into rows.
   First split by cost only, then with equal counts: each rank then has sequences of all lengths,
   which evens out tokens as well.
2. If some part does not fit, pack all sequences into rows that are as full as possible, and deal
   the rows to ranks so that costs are even. Then swap sequences as long as the heaviest rank
   becomes lighter and no row becomes too long.
"""

from collections.abc import Sequence

import numpy as np

from torchtitan.grpo.data.balance import even_out, partition
from torchtitan.grpo.data.packing import fewest_rows, fill_rows, pack_rows

Spread = list[list[list[int]]]
"""For each rank its rows, each a list of indices of sequences."""

_EVEN_RANKS, _EVEN_ROWS = 1e-3, 0.02
"""Ranks, and rows of a rank, whose costs exceed the mean by this fraction are even enough."""


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
    rows = sorted(pack_rows(lengths, row_len), key=lambda row: -sum(lengths[i] for i in row))
    per_rank = max(rows_per_rank(len(rows), num_ranks, multiple), min_rows)
    rows += [[] for _ in range(num_ranks * per_rank - len(rows))]
    turns = [rows[begin : begin + num_ranks] for begin in range(0, len(rows), num_ranks)]
    for turn in turns[1::2]:
        turn.reverse()
    return [list(hand) for hand in zip(*turns, strict=True)]


def rows_per_rank(num_rows: int, num_ranks: int, multiple: int) -> int:
    """Returns the fewest rows for each rank that hold ``num_rows`` in all; at least ``multiple``."""
    return -(-max(num_rows, 1) // (num_ranks * multiple)) * multiple


def group_rows(rows: list[list[int]], costs: Sequence[float], size: int) -> list[list[int]]:
    """Orders a rank's rows so that microbatches of ``size`` consecutive rows have even costs.

    The heaviest microbatch sets the pace of a pipeline. Every rank begins with its heaviest
    microbatch, because ranks wait for each other in each microbatch. The number of rows is a
    multiple of ``size``.
    """
    row_costs = [sum(costs[i] for i in row) for row in rows]
    groups = partition(row_costs, len(rows) // size, equal_counts=True)
    return [rows[i] for group in reversed(groups) for i in group]


def rank_costs(spread: Spread, costs: Sequence[float]) -> list[float]:
    return [sum(costs[i] for row in rows for i in row) for rows in spread]


def _ranks_first(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, per_rank: int, row_len: int
) -> Spread | None:
    for equal_counts in (False, True):
        parts = partition(costs, num_ranks, equal_counts=equal_counts, tolerance=_EVEN_RANKS)
        # Nothing is packed if one part cannot fit.
        if all(sum(lengths[i] for i in part) <= per_rank * row_len for part in parts):
            spread = [_pack_part(part, lengths, costs, per_rank, row_len) for part in parts]
            if all(len(rows) == per_rank for rows in spread):
                return spread
    return None


def _pack_part(
    part: list[int], lengths: Sequence[int], costs: Sequence[float], num_rows: int, row_len: int
) -> list[list[int]]:
    """Packs a rank's sequences into rows of even cost if they fit so, else into full rows."""
    rows = partition([costs[i] for i in part], num_rows, tolerance=_EVEN_ROWS)
    if any(sum(lengths[part[i]] for i in row) > row_len for row in rows):
        rows = fill_rows([lengths[i] for i in part], row_len)
        rows += [[] for _ in range(num_rows - len(rows))]
    return [[part[i] for i in row] for row in rows]


def _rows_first(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, per_rank: int, row_len: int
) -> Spread | None:
    num_rows = num_ranks * per_rank
    rows = fill_rows(lengths, row_len)
    if len(rows) > num_rows:
        rows = pack_rows(lengths, row_len)
    if len(rows) > num_rows:
        return None
    rows += [[] for _ in range(num_rows - len(rows))]
    hands = partition([sum(costs[i] for i in row) for row in rows], num_ranks, equal_counts=True)
    return _evened_out([[rows[r] for r in hand] for hand in hands], lengths, costs, row_len)


def _evened_out(
    spread: Spread, lengths: Sequence[int], costs: Sequence[float], row_len: int
) -> Spread:
    num_ranks, per_rank = len(spread), len(spread[0])
    row_of = np.empty(len(lengths), np.int64)
    for r, row in enumerate(row for rows in spread for row in rows):
        row_of[row] = r
    row_of = even_out(
        costs,
        row_of,
        np.repeat(np.arange(num_ranks), per_rank),
        sizes=lengths,
        row_size=row_len,
        tolerance=_EVEN_RANKS,
    )
    rows = [np.flatnonzero(row_of == r).tolist() for r in range(num_ranks * per_rank)]
    spread = [rows[r : r + per_rank] for r in range(0, len(rows), per_rank)]
    return sorted(spread, key=lambda rows: sum(costs[i] for row in rows for i in row))
