# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Packs sequences into rows and deals rows to ranks. The functions are pure.

A row is a list of indices into ``lengths``. Invariants of :func:`pack_rows`, :func:`fill_rows`
and :func:`pack_into`: every sequence stands in exactly one row, no row is longer than
``row_len``, and equal input gives equal output.
"""

import bisect
import math
from collections.abc import Callable, Sequence

from torchtitan.grpo.data.balance import partition

_MAX_CANDIDATES = 256
"""Number of sequences that :func:`fill_rows` considers for a row, besides the first."""

_EVEN_ROWS = 0.02
"""Rows of a rank whose costs differ by at most this fraction are not evened out further."""


def check_lengths(lengths: Sequence[int], row_len: int) -> None:
    """Raises ``ValueError`` if a length is not in [1, row_len]."""
    for length in lengths:
        if not 1 <= length <= row_len:
            raise ValueError(
                f"A sequence must have 1 to {row_len} tokens (training.seq_len), got {length}."
            )


def pack_rows(lengths: Sequence[int], row_len: int) -> list[list[int]]:
    """Packs sequences into rows by best-fit decreasing.

    Sequences are placed longest first, each into the row that it fills best, or into a new row
    if it fits into none. Raises ``ValueError`` as :func:`check_lengths`.
    """
    check_lengths(lengths, row_len)
    rows: list[list[int]] = []
    # (free tokens, row), sorted: the best fit is the first row with enough room.
    room: list[tuple[int, int]] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        slot = bisect.bisect_left(room, (length, 0))
        if slot == len(room):
            free, row = row_len, len(rows)
            rows.append([])
        else:
            free, row = room.pop(slot)
        rows[row].append(index)
        bisect.insort(room, (free - length, row))
    return rows


def fill_rows(lengths: Sequence[int], row_len: int) -> list[list[int]]:
    """Packs sequences into rows, one row after the other, each as full as possible.

    A row takes the longest sequence that is left, and those of the others that fill the row
    best. The reachable sums are the bits of one integer, which makes the search exact and fast
    (minimum bin slack: Gupta and Ho, 1999, https://doi.org/10.1080/095372899233244). It is
    exact among the 256 longest sequences that fit. Raises ``ValueError`` as
    :func:`check_lengths`.
    """
    check_lengths(lengths, row_len)
    left = _longest_first(lengths)[::-1]
    rows: list[list[int]] = []
    while left:
        first = left.pop()
        free = row_len - lengths[first]
        end = bisect.bisect_right(left, free, key=lambda i: lengths[i])
        places = range(end - 1, max(end - 1 - _MAX_CANDIDATES, -1), -1)
        chosen = _fullest([lengths[left[place]] for place in places], free)
        rows.append([first, *(left[places[c]] for c in chosen)])
        for c in chosen:  # from the back to the front of `left`
            del left[places[c]]
    return rows


def _fullest(lengths: Sequence[int], free: int) -> list[int]:
    """Ascending indices of sequences with the largest sum of lengths up to ``free``."""
    reachable, within = 1, (1 << free + 1) - 1  # Bit s is set if the sum s can be reached.
    before: list[int] = []
    for length in lengths:
        if reachable >> free:
            break
        before.append(reachable)
        reachable |= reachable << length & within
    total = reachable.bit_length() - 1
    chosen: list[int] = []
    for index in reversed(range(len(before))):
        if not before[index] >> total & 1:  # The sum is not reached without this one.
            chosen.append(index)
            total -= lengths[index]
    return chosen[::-1]


def pack_into(
    lengths: Sequence[int], costs: Sequence[float], num_rows: int, row_len: int
) -> list[list[int]] | None:
    """Packs sequences into ``num_rows`` rows, with even costs if such a packing fits.

    Some rows may be empty. Returns None if no packing was found.
    """
    if sum(lengths) > num_rows * row_len:
        return None
    ways: tuple[Callable[[], list[list[int]]], ...] = (
        lambda: partition(costs, num_rows, tolerance=_EVEN_ROWS),
        lambda: partition(lengths, num_rows, tolerance=math.inf),
        lambda: pack_rows(lengths, row_len),
        lambda: fill_rows(lengths, row_len),
    )
    for pack in ways:
        rows = pack()
        if len(rows) <= num_rows and all(sum(lengths[i] for i in r) <= row_len for r in rows):
            return [*rows, *([] for _ in range(num_rows - len(rows)))]
    return None


def fewest_rows(lengths: Sequence[int], row_len: int) -> int:
    """Returns a lower bound of the number of rows of every packing.

    This is Martello and Toth's bound (https://doi.org/10.1016/0166-218X(90)90094-S). Two
    sequences that are longer than half a row never fit into one row, and a sequence longer than
    ``row_len - k`` cannot share its row with a sequence of length k or more.
    """
    ordered = sorted(lengths)
    sums = [0]
    for length in ordered:
        sums.append(sums[-1] + length)
    half = bisect.bisect_right(ordered, row_len // 2)
    bound = -(-sums[-1] // row_len)
    for k in sorted({0, *ordered[:half]}):
        alone = bisect.bisect_right(ordered, row_len - k)
        low = bisect.bisect_left(ordered, k)
        # Sequences between half a row and row_len - k need a row each. Shorter ones fill what
        # is left of these rows, and the rest of the shorter ones needs more rows.
        between = alone - half
        left_over = sums[half] - sums[low] - (between * row_len - (sums[alone] - sums[half]))
        bound = max(bound, len(ordered) - half + max(-(-left_over // row_len), 0))
    return bound


def split_evenly(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Splits things into parts of equal count and of about equal total size, as ascending indices.

    Things are placed largest first, each into the smallest part that is not full. Counts differ
    by at most one, so with fewer things than parts some parts stay empty.
    """
    floor, num_larger = divmod(len(sizes), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for index in _longest_first(sizes):
        # Only num_larger parts may hold one thing more than the floor.
        capacity = floor + (sum(len(part) > floor for part in parts) < num_larger)
        part = min((totals[p], p) for p in range(num_parts) if len(parts[p]) < capacity)[1]
        parts[part].append(index)
        totals[part] += sizes[index]
    return [sorted(part) for part in parts]


def rows_per_rank(num_rows: int, num_ranks: int, multiple: int) -> int:
    """Returns how many rows each rank has to hold ``num_rows`` in all: the least multiple above 0."""
    return -(-max(num_rows, 1) // (num_ranks * multiple)) * multiple


def deal_rows(row_tokens: Sequence[int], num_ranks: int, per_rank: int) -> list[list[int | None]]:
    """Deals rows to ranks, ``per_rank`` to each; None stands for an empty row.

    Rows are dealt in snake order of their tokens, longest first, which evens out the sums.
    There are at most ``num_ranks * per_rank`` rows.
    """
    order = [*_longest_first(row_tokens), *[None] * (per_rank * num_ranks - len(row_tokens))]
    dealt: list[list[int | None]] = [[] for _ in range(num_ranks)]
    for round_start in range(0, len(order), num_ranks):
        hand = order[round_start : round_start + num_ranks]
        ranks = range(num_ranks)
        for rank, row in zip(
            ranks if round_start // num_ranks % 2 == 0 else reversed(ranks), hand, strict=True
        ):
            dealt[rank].append(row)
    return dealt


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
