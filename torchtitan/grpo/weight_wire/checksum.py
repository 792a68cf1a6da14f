# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checksum of a tensor's bytes: exact, and the same on every device.

The bytes, filled up with zeros to whole 32-bit words ``w``, are cut into rows of 2**15
words. The checksum is ``sum(w[row, column] * column_weight * row_weight)`` plus a multiple
of the number of bytes, modulo 2**64. In tensors of up to 16 GiB, by the choice of weights,

    - a single changed word (so a changed byte) always changes it: the weights are odd;
    - swapping two unequal words always changes it: two weights differ by at most 32 factors
      of two, two words by at most 31, which is less than 64 together;
    - other damage (a torn or shifted copy) goes unseen once in about 2**64.

It guards against mistakes and broken hardware, not against malice. Imports torch alone,
since it runs in every server's process as well.
"""

import functools

import torch

_COLUMNS = 2**15
_MODULUS = 2**64
_MIXER = 0x9E3779B97F4A7C15 - _MODULUS  # odd, as int64
_LENGTH_WEIGHT = 0xD6E8FEB86659FD93  # odd
# Rows at once: what fits the processor's cache, or keeps a GPU busy (64 MiB temporary).
_CPU_ROWS, _GPU_ROWS = 1, 256


@torch.no_grad()
def tensor_checksum(data: torch.Tensor) -> int:
    """Checksum of the bytes of ``data``, row-major, in [0, 2**64)."""
    octets = data.detach().contiguous().view(-1).view(torch.uint8)
    num_bytes = octets.numel()
    row_bytes = 4 * _COLUMNS
    num_whole = num_bytes // row_bytes
    sums = [
        _row_sums(block.view(-1, row_bytes))
        for block in octets[: num_whole * row_bytes].split(_block_rows(octets) * row_bytes)
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


def _block_rows(octets: torch.Tensor) -> int:
    return _CPU_ROWS if octets.device.type == "cpu" else _GPU_ROWS


def _row_sums(octets: torch.Tensor) -> torch.Tensor:
    """[rows] int64 from [rows, row_bytes] uint8."""
    if octets.data_ptr() % 4:
        octets = octets.clone()
    # Integer sums wrap around, in any order, and so are the same whatever adds them up.
    return (octets.view(torch.int32).long() * _column_weights(octets.device)).sum(dim=1)


@functools.lru_cache(maxsize=4)
def _column_weights(device: torch.device) -> torch.Tensor:
    """[columns] int64, odd, and different from one another modulo twice their number."""
    return 2 * _scattered(torch.arange(1, _COLUMNS + 1, device=device)) + 1


def _row_weights(rows: torch.Tensor) -> torch.Tensor:
    """[rows] int64, each 1 modulo twice the number of columns, and each different."""
    return 2 * _COLUMNS * _scattered(torch.arange(1, rows.numel() + 1, device=rows.device)) + 1


def _scattered(index: torch.Tensor) -> torch.Tensor:
    """A permutation of the int64: two images differ by as many factors of two as two indices."""
    return index * (2 * index + 1) * _MIXER
