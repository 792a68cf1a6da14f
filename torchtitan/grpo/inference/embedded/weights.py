# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The model's parameters by their Hugging Face names."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

WIRE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes that weights may come in; they are cast to the model's."""


class WeightTable:
    """Checks, writes and sums up the parameters of a model.

    Tied parameters are known under each of their names.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters: dict[str, torch.Tensor] = dict(model.state_dict())

    def check(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """Raises ValueError unless every tensor described fits the model."""
        if not len(names) == len(dtypes) == len(shapes) or not names:
            raise ValueError(
                "names, dtypes and shapes must be lists of one length, at least 1, got "
                f"{len(names)}, {len(dtypes)} and {len(shapes)}."
            )
        unknown = [name for name in names if name not in self._parameters]
        if unknown:
            raise ValueError(
                f"{len(unknown)} of {len(names)} parameter names are not the model's: "
                f"{unknown[:3]}. Names must be Hugging Face's, such as "
                f"{next(iter(self._parameters))!r}."
            )
        if len(set(names)) < len(names):
            raise ValueError("A parameter name occurs twice in one update.")
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if dtype not in WIRE_DTYPES:
                raise ValueError(
                    f"{name}: dtype must be one of {sorted(WIRE_DTYPES)}, got {dtype!r}."
                )
            expected = list(self._parameters[name].shape)
            if shape != expected:
                raise ValueError(f"{name}: shape must be {expected}, got {shape}.")

    def check_complete(self, names: Iterable[str]) -> None:
        """Raises ValueError unless ``names`` cover every parameter (tied ones once)."""
        covered = {self._parameters[name].data_ptr() for name in names}
        missing = [n for n, p in self._parameters.items() if p.data_ptr() not in covered]
        if missing:
            raise ValueError(f"{len(missing)} parameters are missing, such as {missing[:3]}.")

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes checked tensors, cast to the model's dtype and moved to its device."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._parameters[name].copy_(tensor)

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter's bytes, in the model's dtype."""
        return {name: tensor_sha256(p) for name, p in self._parameters.items()}


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, row-major."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def split_bucket(
    bucket: torch.Tensor, names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> dict[str, torch.Tensor]:
    """Cuts a [bytes] uint8 tensor into the tensors that follow one another in it."""
    tensors: dict[str, torch.Tensor] = {}
    offset = 0
    for name, size, dtype, shape in zip(
        names, tensor_bytes(dtypes, shapes), dtypes, shapes, strict=True
    ):
        piece = bucket[offset : offset + size]
        if offset % WIRE_DTYPES[dtype].itemsize:
            piece = piece.clone()  # a view of another dtype must be aligned
        tensors[name] = piece.view(WIRE_DTYPES[dtype]).view(shape)
        offset += size
    return tensors


def tensor_bytes(dtypes: list[str], shapes: list[list[int]]) -> list[int]:
    """Size of each tensor in bytes."""
    return [
        torch.Size(shape).numel() * WIRE_DTYPES[dtype].itemsize
        for dtype, shape in zip(dtypes, shapes, strict=True)
    ]


def read_safetensors(directory: str) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory's safetensors files, on the CPU.

    Raises:
        ValueError: There are none.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ValueError(f"model_path must hold safetensors files, found none in {directory}.")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return tensors
