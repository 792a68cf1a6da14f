# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which sequences share a row. Pure; nothing of torch.

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
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
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


def deal_rows(row_tokens: Sequence[int], num_ranks: int, multiple: int) -> list[list[int | None]]:
    """Deals rows to ranks, the same number to each.

    Rows go out in snake order of their tokens, longest first, which evens the sums out.

    Args:
        row_tokens: Tokens in each row.
        num_ranks: Data-parallel ranks.
        multiple: Each rank's number of rows is a multiple of this (the microbatch).

    Returns:
        For each rank its rows, None standing for an empty row.
    """
    longest_first = sorted(range(len(row_tokens)), key=lambda i: (-row_tokens[i], i))
    per_rank = -(-max(len(row_tokens), 1) // (num_ranks * multiple)) * multiple
    order = [*longest_first, *[None] * (per_rank * num_ranks - len(row_tokens))]
    dealt: list[list[int | None]] = [[] for _ in range(num_ranks)]
    for round_start in range(0, len(order), num_ranks):
        hand = order[round_start : round_start + num_ranks]
        ranks = range(num_ranks)
        for rank, row in zip(
            ranks if round_start // num_ranks % 2 == 0 else reversed(ranks), hand, strict=True
        ):
            dealt[rank].append(row)
    return dealt
