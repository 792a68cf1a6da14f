# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes the sizes of buckets, checks them, and splits their bytes into tensors."""

from collections.abc import Iterable, Sequence

import torch

from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.weight_wire.sparse import delta_bytes
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

WIRE_DTYPES = TORCH_DTYPE_MAP
"""Dtypes in which weights may be sent, by their names in messages."""

# In bytes. Vector instructions are slow on tensors that begin elsewhere.
_ALIGNMENT = 64


def tensor_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[int]:
    return [
        torch.Size(shape).numel() * WIRE_DTYPES[dtype].itemsize
        for dtype, shape in zip(dtypes, shapes, strict=True)
    ]


def bucket_bytes(bucket: BucketSpec) -> int:
    """Returns the length of a bucket's payload in bytes. Raises ValueError for an impossible delta."""
    if bucket.num_changed is None:
        return sum(tensor_bytes(bucket.dtypes, bucket.shapes))
    numels, itemsize = element_counts(bucket)
    return delta_bytes(numels, bucket.num_changed, itemsize)


def check_lengths(bucket: BucketSpec) -> None:
    """Raises ValueError unless all lists of a bucket have the same length, at least 1."""
    lists = (bucket.dtypes, bucket.shapes, bucket.checksums, bucket.num_changed)
    lengths = [len(bucket.names)] + [len(entries) for entries in lists if entries is not None]
    if min(lengths) != max(lengths) or not lengths[0]:
        raise ValueError(
            "names, dtypes, shapes, and checksums and num_changed where given, must be lists of "
            f"one length, at least 1, got {lengths}."
        )


def element_counts(bucket: BucketSpec) -> tuple[list[int], int]:
    """Returns the number of elements of each tensor in a delta, and the bytes of one element."""
    itemsizes = {WIRE_DTYPES[dtype].itemsize for dtype in bucket.dtypes}
    if len(itemsizes) != 1:
        raise ValueError(f"The tensors of a delta must have one item size, got {bucket.dtypes}.")
    return [torch.Size(shape).numel() for shape in bucket.shapes], itemsizes.pop()


def split_bucket(buffer: torch.Tensor, bucket: BucketSpec) -> list[torch.Tensor]:
    """Returns the tensors of a payload: views where they are aligned, copies elsewhere."""
    sizes = tensor_bytes(bucket.dtypes, bucket.shapes)
    return [
        aligned(part).view(WIRE_DTYPES[dtype]).view(shape)
        for part, dtype, shape in zip(
            buffer.split(sizes), bucket.dtypes, bucket.shapes, strict=True
        )
    ]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def is_exact_in(wire_dtype: torch.dtype, held_dtype: torch.dtype) -> bool:
    """Returns whether ``held_dtype`` represents every value of ``wire_dtype``."""
    return held_dtype in (wire_dtype, torch.float32)


def refuse_wrong_dtypes(dtypes: Iterable[str]) -> None:
    """Raises ValueError unless each dtype is one of those in which tensors are sent."""
    wrong = set(dtypes) - WIRE_DTYPES.keys()
    if wrong:
        raise ValueError(f"dtypes must be among {sorted(WIRE_DTYPES)}, got {sorted(wrong)}.")
