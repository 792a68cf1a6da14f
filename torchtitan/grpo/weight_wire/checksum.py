# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checksum of a tensor's bytes, which is the same on every device.

The bytes are padded with zeros to whole 32-bit words ``w``, in rows of 2**15. The checksum is
``sum(w[row, column] * column_weight * row_weight)`` plus a multiple of the number of bytes, modulo
2**64. In tensors of up to 16 GiB,

    - a change of a single word always changes the checksum, because all weights are odd;
    - exchanging two different words always changes it, because the difference of two weights has
      at most 32 factors of two and that of two words at most 31, which is less than 64 together;
    - other damage, such as a torn or shifted copy, is missed with a probability of about 2**-64.

The checksum guards against mistakes and broken hardware, not against malice. Servers import this
module too, so it needs only torch.
"""

import functools

import torch

_COLUMNS = 2**15
_MODULUS = 2**64
_MIXER = 0x9E3779B97F4A7C15 - _MODULUS  # odd, as int64
_LENGTH_WEIGHT = 0xD6E8FEB86659FD93  # odd
# Rows that are summed at once: few enough for a CPU's cache, and enough to keep a GPU busy (with
# 64 MiB of temporary memory).
_CPU_ROWS, _GPU_ROWS = 1, 128


@torch.no_grad()
def tensor_checksum(data: torch.Tensor) -> int:
    """Returns the checksum of the bytes of ``data`` in row-major order, in [0, 2**64)."""
    octets = data.detach().contiguous().view(-1).view(torch.uint8)
    num_bytes = octets.numel()
    row_bytes = 4 * _COLUMNS
    num_whole = num_bytes // row_bytes
    block_rows = _CPU_ROWS if octets.device.type == "cpu" else _GPU_ROWS
    sums = [
        _row_sums(block.view(-1, row_bytes))
        for block in octets[: num_whole * row_bytes].split(block_rows * row_bytes)
        if block.numel()
    ]
    if num_bytes % row_bytes:
        last = octets.new_zeros(1, row_bytes)
        last[0, : num_bytes % row_bytes] = octets[num_whole * row_bytes :]
        sums.append(_row_sums(last))
    total = 0
    if sums:
        rows = torch.cat(sums)
        total = int((rows * _row_weights(rows)).sum())
    return (total + _LENGTH_WEIGHT * num_bytes) % _MODULUS


def _row_sums(octets: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sums [rows] int64 of the words in each row of ``octets`` [rows, row_bytes] uint8."""
    if octets.data_ptr() % 4:
        octets = octets.clone()
    # Integer sums wrap around, so the result does not depend on the order of the additions.
    return (octets.view(torch.int32).long() * _column_weights(octets.device)).sum(dim=1)


@functools.lru_cache(maxsize=4)
def _column_weights(device: torch.device) -> torch.Tensor:
    """Returns the column weights [columns] int64, odd and distinct modulo twice the number of columns."""
    return 2 * _scattered(torch.arange(1, _COLUMNS + 1, device=device)) + 1


def _row_weights(rows: torch.Tensor) -> torch.Tensor:
    """Returns the row weights [rows] int64, distinct and each 1 modulo twice the number of columns."""
    return 2 * _COLUMNS * _scattered(torch.arange(1, rows.numel() + 1, device=rows.device)) + 1


def _scattered(index: torch.Tensor) -> torch.Tensor:
    """Maps indices to scattered int64 values, from which the weights are made.

    The difference of two values has as many factors of two as the difference of their indices. The
    guarantee for exchanged words (see the module) follows from this.
    """
    return index * (2 * index + 1) * _MIXER
