# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lossless deltas between two versions of a bucket.

A bucket is a flat payload of bytes, tensors of one item size after one another. Its delta
is the same in short: for each tensor the positions of the elements that changed, int32,
and then their new values; or the whole tensor, where that is not longer. Elements are
compared and copied as bits, so NaNs and the sign of zero arrive as they were. Imports torch
alone, since it runs in every server's process as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

WHOLE = -1
"""``num_changed`` of a tensor that comes whole."""

_INDEX_BYTES = 4
_MAX_NUMEL = 2**31 - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Changes:
    """What is new in one tensor.

    Attributes:
        indices: [num_changed] int32 positions in the flattened tensor; None where all of
            it is new.
        values: [num_changed], or [numel], bits of the new elements as integers.
    """

    indices: torch.Tensor | None
    values: torch.Tensor


def encode(
    previous: torch.Tensor, current: torch.Tensor, numels: Sequence[int], itemsize: int
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The delta from one version of a bucket to the next.

    Args:
        previous: [num_bytes] uint8, what the receiver holds.
        current: [num_bytes] uint8, what it is to hold.
        numels: Number of elements of each tensor.
        itemsize: Bytes of one element: 1, 2, 4 or 8.

    Returns:
        [delta_bytes] uint8, and for each tensor the number of changed elements, or -1
        where it comes whole.

    Raises:
        ValueError: The sizes contradict one another.
    """
    num_bytes = sum(numels) * itemsize
    if not previous.numel() == current.numel() == num_bytes:
        raise ValueError(
            f"Both versions must have {num_bytes} bytes, {sum(numels)} elements of {itemsize}, "
            f"got {previous.numel()} and {current.numel()}."
        )
    sizes = [numel * itemsize for numel in numels]
    parts: list[torch.Tensor] = []
    num_changed: list[int] = []
    for old, new in zip(previous.split(sizes), current.split(sizes), strict=True):
        old_bits, new_bits = _as_bits(old, itemsize), _as_bits(new, itemsize)
        indices = _changed(old_bits, new_bits)
        if indices is None:
            num_changed.append(WHOLE)
            parts.append(new)
        else:
            num_changed.append(indices.numel())
            parts += [indices.to(torch.int32).view(torch.uint8)]
            parts += [new_bits[indices].view(torch.uint8)]
    return torch.cat(parts) if parts else current[:0], tuple(num_changed)


def _changed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """Where two tensors of bits differ; None where sending all of it is not longer."""
    if new.numel() > _MAX_NUMEL:
        return None
    differs = old != new
    # Counted first: the indices of a tensor that is new throughout are large.
    count = int(differs.sum())
    if count * (_INDEX_BYTES + new.element_size()) >= new.nbytes and count:
        return None
    return differs.nonzero().view(-1)


def delta_bytes(numels: Sequence[int], num_changed: Sequence[int], itemsize: int) -> int:
    """Length of a delta.

    Raises:
        ValueError: A count is impossible.
    """
    total = 0
    for numel, count in zip(numels, num_changed, strict=True):
        if not WHOLE <= count <= numel:
            raise ValueError(f"num_changed must be -1, or 0 to {numel} elements, got {count}.")
        total += numel * itemsize if count == WHOLE else count * (_INDEX_BYTES + itemsize)
    return total


def decode(
    payload: torch.Tensor, numels: Sequence[int], num_changed: Sequence[int], itemsize: int
) -> list[Changes]:
    """What a delta says of each tensor; the inverse of :func:`encode`.

    Raises:
        ValueError: The payload's length is not what the counts make, or an index is
            outside its tensor.
    """
    expected = delta_bytes(numels, num_changed, itemsize)
    if payload.numel() != expected:
        raise ValueError(f"The delta must have {expected} bytes, got {payload.numel()}.")
    found: list[Changes] = []
    offset = 0
    for numel, count in zip(numels, num_changed, strict=True):
        indices = None
        if count != WHOLE:
            end = offset + count * _INDEX_BYTES
            indices = _as_bits(payload[offset:end], _INDEX_BYTES)
            if count and not 0 <= int(indices.min()) <= int(indices.max()) < numel:
                raise ValueError(f"A delta's indices must be in [0, {numel}).")
            offset = end
        end = offset + (numel if count == WHOLE else count) * itemsize
        found.append(Changes(indices, _as_bits(payload[offset:end], itemsize)))
        offset = end
    return found


def apply(target: torch.Tensor, changes: Changes) -> None:
    """Writes changes into a contiguous tensor of the wire dtype."""
    bits = target.view(-1).view(_BITS[target.element_size()])
    if changes.indices is None:
        bits.copy_(changes.values)
    else:
        bits[changes.indices.long()] = changes.values


def _as_bits(octets: torch.Tensor, itemsize: int) -> torch.Tensor:
    # A view of another dtype must be aligned, to the storage and in memory.
    if octets.storage_offset() % itemsize or octets.data_ptr() % itemsize:
        octets = octets.clone()
    return octets.view(_BITS[itemsize])
