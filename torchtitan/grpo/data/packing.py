# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Packs sequences into rows. The functions are pure.

A row is a list of indices into ``lengths``. Every sequence stands in exactly one row, no row is
longer than ``row_len``, and equal input gives equal output. A ``ValueError`` says that a length is
not in [1, row_len].
"""

import bisect
from collections.abc import Sequence

_MAX_CANDIDATES = 256
"""Number of sequences that :func:`fill_rows` considers for a row, besides the first."""


def pack_rows(lengths: Sequence[int], row_len: int) -> list[list[int]]:
    """Packs sequences into rows by best-fit decreasing.

    Sequences are placed longest first, each into the row that it fills best, or into a new row
    if it fits into none.
    """
    rows: list[list[int]] = []
    # (free tokens, row), sorted: the best fit is the first row with enough room.
    room: list[tuple[int, int]] = []
    for index in _longest_first(lengths, row_len):
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
    exact among the 256 longest sequences that fit.
    """
    left = _longest_first(lengths, row_len)[::-1]
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


def fewest_rows(lengths: Sequence[int], row_len: int) -> int:
    """Returns a lower bound of the number of rows of every packing.

    This is Martello and Toth's bound (https://doi.org/10.1016/0166-218X(90)90094-S). Two
    sequences that are longer than half a row never fit into one row, and a sequence longer than
    ``row_len - k`` cannot share its row with a sequence of length k or more.
    """
    ordered = [lengths[i] for i in reversed(_longest_first(lengths, row_len))]
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


def _longest_first(lengths: Sequence[int], row_len: int) -> list[int]:
    for length in lengths:
        if not 1 <= length <= row_len:
            raise ValueError(
                f"A sequence must have 1 to {row_len} tokens (training.seq_len), got {length}."
            )
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
