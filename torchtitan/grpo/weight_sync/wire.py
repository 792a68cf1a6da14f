# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Weights as they travel: dtypes, sizes, and directories of safetensors files.

Runs in every server's process as well, so it imports torch and safetensors alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from torchtitan.grpo.weight_sync.checksum import tensor_checksum

WIRE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes that weights may come in."""

CHECKSUMS_FILE = "checksums.json"
"""``{tensor name: checksum}`` beside the safetensors files of a pushed version."""


def tensor_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Size of each tensor in bytes."""
    return [
        torch.Size(shape).numel() * WIRE_DTYPES[dtype].itemsize
        for dtype, shape in zip(dtypes, shapes, strict=True)
    ]


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
