# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Low-rank adapters that are pushed without base weights; the server adds them to its own base weights.

The base weights are read anew for each version from the directory that the server was started
from. So the server needs no second copy of them, and no version depends on the one before.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open

from torchtitan.grpo.weight_wire.adapter_names import (
    FACTORS,
    PEFT_PREFIX,
    factor_of,
    is_adapter,
    served_weight_of,
)
from torchtitan.grpo.weight_wire.model_files import WeightFiles
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec


def is_of_adapters(bucket: BucketSpec) -> bool:
    """Returns whether a bucket holds adapters. Raises ValueError if it is a delta, or holds weights too."""
    if bucket.lora_scale is None:
        return False
    if bucket.num_changed is not None:
        raise ValueError("Adapters must be sent whole, got a delta. Set weight_sync.delta = false.")
    wrong = [n for n in bucket.names if not (n.startswith(PEFT_PREFIX) and is_adapter(n))]
    if wrong:
        raise ValueError(
            f"Names beside a lora_scale must be PEFT's, {PEFT_PREFIX}<module>{FACTORS[0]} or "
            f"{FACTORS[1]}, got {wrong[:3]}."
        )
    return True


def base_digest(folder: str) -> str:
    """Returns a digest of a directory's names, dtypes, shapes, and first and last rows.

    Training changes every weight, so the rows tell models apart. How the tensors are divided among
    files does not matter.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(WeightFiles(Path(folder), "base weights").slices().items()):
        rows = (tensor[:1], tensor[-1:]) if tensor.get_shape() else (tensor[...],)
        ends = torch.cat([row.flatten() for row in rows])
        digest.update(f"{name} {tensor.get_dtype()} {tensor.get_shape()} ".encode())
        digest.update(ends.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class BaseWeights:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._stored = WeightFiles(Path(folder), "base weights").headers()

    @cached_property
    def _digest(self) -> str:
        return base_digest(self._folder)

    def check(self, bucket: BucketSpec) -> None:
        """Raises ValueError if a bucket's adapters belong to other base weights, or do not fit these."""
        if bucket.lora_base != self._digest:
            raise ValueError(
                "Adapters can only be added to the base weights with which they are trained, and those "
                f"in {self._folder} are others. Start the server with the directory of "
                "model.hf_assets_path, or set lora.push = 'merged'."
            )
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            target = served_weight_of(name)
            if target not in self._stored:
                raise ValueError(
                    f"{name} must belong to a weight of the server's model, and {self._folder} has no "
                    f"{target}. Start the server with the directory of model.hf_assets_path."
                )
            size_out, size_in = self._stored[target].shape
            # A is [rank, in] and B is [out, rank].
            fits = (1, size_in) if factor_of(name) == FACTORS[0] else (0, size_out)
            if len(shape) != 2 or shape[fits[0]] != fits[1]:
                raise ValueError(
                    f"{name} must fit {target} of shape {[size_out, size_in]}, got {list(shape)}."
                )

    def require_pairs(self, factors: Mapping[str, torch.Tensor]) -> None:
        for target in dict.fromkeys(served_weight_of(name) for name in factors):
            if not all(name in factors for name in _factors_of(target)):
                raise ValueError(f"The adapter of {target} must have both of its factors.")

    @torch.no_grad()
    def adapted(
        self, factors: Mapping[str, torch.Tensor], scale: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each adapted weight with ``scale * B A`` added, bit for bit as a trainer merges it."""
        self.require_pairs(factors)
        for target in dict.fromkeys(served_weight_of(name) for name in factors):
            rows, columns = (factors[name] for name in _factors_of(target))
            weight = self._read(target).to(rows.dtype, copy=True)
            yield target, weight.addmm_(columns.cpu(), rows.cpu(), alpha=scale)

    def all_with(
        self, factors: Mapping[str, torch.Tensor], scale: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        targets = {served_weight_of(name) for name in factors}
        for name in self._stored:
            if name not in targets:
                yield name, self._read(name)
        yield from self.adapted(factors, scale)

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._stored[name].file, framework="pt") as opened:
            return opened.get_tensor(name)


def _factors_of(target: str) -> list[str]:
    stem = PEFT_PREFIX + target.removesuffix(".weight")
    return [stem + factor for factor in FACTORS]
