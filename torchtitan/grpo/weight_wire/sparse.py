# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lossless deltas between two versions of a bucket, whose tensors have one item size.

The payload holds for each tensor the int32 positions of the elements that changed, followed by
their new values, or the whole tensor if that is not longer. Elements are compared and copied as
bits, so NaNs and the sign of zero are preserved. Servers import this too; it needs only torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

WHOLE = -1
"""``num_changed`` of a tensor that is sent whole."""

_INDEX_BYTES = 4
_MAX_NUMEL = 2**31 - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Changes:
    """The new elements of one tensor.

    ``indices`` are [num_changed] int32, in the flattened tensor; ``None`` if the tensor is sent
    whole. ``values`` are [num_changed] or [numel] integers, the bits of the elements.
    """

    indices: torch.Tensor | None
    values: torch.Tensor


def encode(
    previous: torch.Tensor, current: torch.Tensor, numels: Sequence[int], itemsize: int
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Returns the delta between two versions of a bucket, which are [num_bytes] uint8 each.

    Also returns for each tensor the number of changed elements, or -1 if it is sent whole.
    ``itemsize`` is 1, 2, 4 or 8.
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
            parts.append(indices.to(torch.int32).view(torch.uint8))
            parts.append(new_bits[indices].view(torch.uint8))
    return torch.cat(parts) if parts else current[:0], tuple(num_changed)


def _changed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """Returns where two tensors of bits differ, or ``None`` if a delta would be no shorter than ``new``."""
    if new.numel() > _MAX_NUMEL:
        return None
    differs = old != new
    # Counted first, because the indices of a tensor that changed everywhere take much memory.
    count = int(differs.sum())
    if count * (_INDEX_BYTES + new.element_size()) >= new.nbytes and count:
        return None
    return differs.nonzero().view(-1)


def delta_bytes(numels: Sequence[int], num_changed: Sequence[int], itemsize: int) -> int:
    """Returns a delta's length in bytes. Raises ValueError if a count is neither -1 nor 0 to ``numel``."""
    total = 0
    for numel, count in zip(numels, num_changed, strict=True):
        if not WHOLE <= count <= numel:
            raise ValueError(f"num_changed must be -1, or 0 to {numel} elements, got {count}.")
        total += numel * itemsize if count == WHOLE else count * (_INDEX_BYTES + itemsize)
    return total


def decode(
    payload: torch.Tensor, numels: Sequence[int], num_changed: Sequence[int], itemsize: int
) -> list[Changes]:
    """Undoes :func:`encode`. Raises ValueError if the payload contradicts the counts or ``numels``."""
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
    """Writes changes into a contiguous tensor of the dtype in which they were sent."""
    # They may have come over NCCL, and the tensor may be a copy that is kept in host memory.
    bits = target.view(-1).view(_BITS[target.element_size()])
    values = changes.values.to(target.device)
    if changes.indices is None:
        bits.copy_(values)
    else:
        bits[changes.indices.to(target.device).long()] = values


def _as_bits(octets: torch.Tensor, itemsize: int) -> torch.Tensor:
    # A view of another dtype must be aligned in its storage and in memory.
    if octets.storage_offset() % itemsize or octets.data_ptr() % itemsize:
        octets = octets.clone()
    return octets.view(_BITS[itemsize])
