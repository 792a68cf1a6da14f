# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which sequences share a row, and who gets which row. Pure; nothing of torch.

Invariants of :func:`pack_rows`: every sequence stands in exactly one row, no row is longer
than ``row_len``, and equal input gives equal output.
"""

import bisect
from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], row_len: int) -> list[list[int]]:
    """Packs sequences into rows by best-fit decreasing.

    The longest sequence goes first, each into the row that it fills best, or into a new one.

    Args:
        lengths: Tokens of each sequence, each in [1, row_len].
        row_len: Tokens of a row.

    Returns:
        Rows, each a list of indices into ``lengths``.

    Raises:
        ValueError: A sequence does not fit into a row.
    """
    rows: list[list[int]] = []
    # (free tokens, row), sorted: the best fit is the first row with enough room.
    room: list[tuple[int, int]] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        if not 1 <= length <= row_len:
            raise ValueError(
                f"A sequence must have 1 to {row_len} tokens (training.seq_len), got {length}."
            )
        slot = bisect.bisect_left(room, (length, 0))
        if slot == len(room):
            free, row = row_len, len(rows)
            rows.append([])
        else:
            free, row = room.pop(slot)
        rows[row].append(index)
        bisect.insort(room, (free - length, row))
    return rows


def split_evenly(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Splits things into parts of equal count and of about equal total size.

    The largest goes first, each to the smallest part that is not full. Counts differ by one
    at most, so with fewer things than parts some parts stay empty.

    Args:
        sizes: Of each thing, at least 0.
        num_parts: At least 1.

    Returns:
        For each part its things, as ascending indices into ``sizes``.
    """
    floor, num_larger = divmod(len(sizes), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for index in _longest_first(sizes):
        # A part may take one above the floor only while such places are left.
        capacity = floor + (sum(len(part) > floor for part in parts) < num_larger)
        part = min((totals[p], p) for p in range(num_parts) if len(parts[p]) < capacity)[1]
        parts[part].append(index)
        totals[part] += sizes[index]
    return [sorted(part) for part in parts]


def rows_per_rank(num_rows: int, num_ranks: int, multiple: int) -> int:
    """The fewest rows a rank, at least one microbatch, that hold ``num_rows`` in all."""
    return -(-max(num_rows, 1) // (num_ranks * multiple)) * multiple


def deal_rows(row_tokens: Sequence[int], num_ranks: int, per_rank: int) -> list[list[int | None]]:
    """Deals rows to ranks, ``per_rank`` to each.

    Rows go out in snake order of their tokens, longest first, which evens the sums out.

    Args:
        row_tokens: Tokens in each row; at most ``num_ranks * per_rank`` rows.
        num_ranks: Data-parallel ranks.
        per_rank: Rows of each rank, see :func:`rows_per_rank`.

    Returns:
        For each rank its rows, None standing for an empty row.
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
