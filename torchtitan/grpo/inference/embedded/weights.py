# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The model's parameters by their Hugging Face names."""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import torch

from torchtitan.grpo.weight_wire.buckets import WIRE_DTYPES, aligned, is_exact_in


class WeightTable:
    """Checks, replaces and sums up the parameters of a model.

    Tied parameters are known under each of their names.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # The parameters themselves, not detached copies: their storage is replaced.
        self._parameters: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))

    def check(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Raises ValueError unless every tensor described fits the model."""
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
            if list(shape) != expected:
                raise ValueError(f"{name}: shape must be {expected}, got {list(shape)}.")

    def missing(self, names: Collection[str]) -> list[str]:
        """Parameters that ``names`` do not cover; tied ones need one name."""
        covered = {id(self._parameters[name]) for name in names}
        return [n for n, p in self._parameters.items() if id(p) not in covered]

    def is_exact(self, name: str, wire_dtype: torch.dtype) -> bool:
        """Whether the parameter's dtype holds every value of ``wire_dtype``."""
        return is_exact_in(wire_dtype, self._parameters[name].dtype)

    def in_wire_dtype(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a parameter, as it travelled."""
        return self._parameters[name].detach().to(dtype, copy=True)

    @torch.no_grad()
    def prepared(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A checked tensor as :meth:`adopt` takes it: in the model's dtype, on its device."""
        held = self._parameters[name]
        return aligned(tensor.to(device=held.device, dtype=held.dtype))

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes prepared tensors the parameters. Nothing is copied, so it takes no time."""
        for name, tensor in tensors.items():
            self._parameters[name].data = tensor

    def tensors(self) -> list[torch.Tensor]:
        """All parameters."""
        return list(self._parameters.values())

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter's bytes, in the model's dtype."""
        return {name: tensor_sha256(p) for name, p in self._parameters.items()}


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, row-major."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
