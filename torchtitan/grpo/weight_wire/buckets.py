# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Weights as they travel: the bytes of buckets, and directories of safetensors files.

Runs in every server's process as well, so it imports torch and safetensors alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.sparse import delta_bytes
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

WIRE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes that weights may come in."""

# Vector instructions want it, and allocators give it.
_ALIGNMENT = 64

CHECKSUMS_FILE = "checksums.json"
"""``{tensor name: checksum}`` beside the safetensors files of a pushed version."""


def tensor_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Size of each tensor in bytes."""
    return [
        torch.Size(shape).numel() * WIRE_DTYPES[dtype].itemsize
        for dtype, shape in zip(dtypes, shapes, strict=True)
    ]


def bucket_bytes(bucket: BucketSpec) -> int:
    """Length of the payload that a bucket travels as.

    Raises:
        ValueError: A delta's counts are impossible, or its tensors differ in item size.
    """
    if bucket.num_changed is None:
        return sum(tensor_bytes(bucket.dtypes, bucket.shapes))
    numels, itemsize = element_counts(bucket)
    return delta_bytes(numels, bucket.num_changed, itemsize)


def check_lengths(bucket: BucketSpec) -> None:
    """Raises ValueError unless a bucket's lists are of one length, at least 1."""
    lists = (bucket.dtypes, bucket.shapes, bucket.checksums, bucket.num_changed)
    lengths = [len(bucket.names)] + [len(entries) for entries in lists if entries is not None]
    if min(lengths) != max(lengths) or not lengths[0]:
        raise ValueError(
            "names, dtypes, shapes, and checksums and num_changed where given, must be lists of "
            f"one length, at least 1, got {lengths}."
        )


def element_counts(bucket: BucketSpec) -> tuple[list[int], int]:
    """Elements of each tensor of a delta, and bytes of an element.

    Raises:
        ValueError: They differ in item size.
    """
    itemsizes = {WIRE_DTYPES[dtype].itemsize for dtype in bucket.dtypes}
    if len(itemsizes) != 1:
        raise ValueError(f"The tensors of a delta must be of one item size, got {bucket.dtypes}.")
    return [torch.Size(shape).numel() for shape in bucket.shapes], itemsizes.pop()


def split_bucket(buffer: torch.Tensor, bucket: BucketSpec) -> list[torch.Tensor]:
    """The tensors that follow one another in a buffer, as views where they are aligned."""
    sizes = tensor_bytes(bucket.dtypes, bucket.shapes)
    return [
        aligned(part).view(WIRE_DTYPES[dtype]).view(shape)
        for part, dtype, shape in zip(
            buffer.split(sizes), bucket.dtypes, bucket.shapes, strict=True
        )
    ]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy where computing with it would be slow."""
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def is_exact_in(wire_dtype: torch.dtype, held_dtype: torch.dtype) -> bool:
    """Whether every value of one dtype is also one of the other."""
    return held_dtype in (wire_dtype, torch.float32)


def read_safetensors(directory: str) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files, on the CPU.

    Raises:
        ValueError: There are none, or they are not those of the directory's
            ``checksums.json``, where it has one.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ValueError(f"model_path must hold safetensors files, found none in {directory}.")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                # Copied: else they are maps of the file, and change or fail with it while served.
                tensors.update({name: opened.get_tensor(name).clone() for name in opened.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file} must be a whole safetensors file: {error}") from error
    _compare_checksums(Path(directory), tensors)
    return tensors


def _compare_checksums(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = directory / CHECKSUMS_FILE
    if not file.is_file():
        return
    expected = json.loads(file.read_text())
    if expected.keys() != tensors.keys():
        different = sorted(expected.keys() ^ tensors.keys())
        raise ValueError(f"{file} must name the tensors beside it; {different[:3]} differ.")
    for name, tensor in tensors.items():
        if (found := tensor_checksum(tensor)) != expected[name]:
            raise ValueError(f"{name} must have checksum {expected[name]} by {file}, got {found}.")
