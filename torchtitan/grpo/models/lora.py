# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Low-rank adapters (https://arxiv.org/abs/2106.09685) on the linear layers of a decoder.

    output = W x + alpha / rank * B (A x)        W [out, in], A [rank, in], B [out, rank]

A target keeps its name and weight, and gets layers ``lora_A`` and ``lora_B``, as in PEFT. Under
tensor parallelism, a target divided by rows has its ``B`` divided by rows, and one divided by
columns its ``A`` by columns; every rank holds the other factor whole. Pushes and exports may
add adapters to whole targets, in the dtype of the result, so that both have the same bits.
"""

import json
import math
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchtitan.grpo.config import LoRA
from torchtitan.grpo.models.collect import Collector, agree_on_assembly
from torchtitan.grpo.models.decoder import blocks_of
from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.shards import local_block, local_tensor, named_parameters
from torchtitan.grpo.models.weight_grads import DeferredLinear
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.weight_wire.adapter_names import (
    FACTORS,
    PEFT_PREFIX,
    factor_of,
    is_adapter,
    module_of,
    target_of,
)
from torchtitan.grpo.weight_wire.adapters import base_digest

_MEASURED_ROWS = 8


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter, which :func:`adapters_off` switches off."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_scale: float
    is_adapted: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = F.linear(input, self.weight, self.bias)
        if not self.is_adapted:
            return output
        change = self.lora_B(self.lora_A(input)) * self.lora_scale
        if isinstance(output, DTensor) and isinstance(change, DTensor):
            # If the input is divided, the output is a sum over ranks that is not computed yet. The
            # change becomes a summand, so that a single collective computes both.
            change = change.redistribute(placements=output.placements)
        return output + change


def add_adapters(model: nn.Module, lora: LoRA, dtype: torch.dtype) -> None:
    """Freezes a model or pipeline stage in place, and gives its target layers adapters of ``dtype``.

    Call it on the meta device after tensor parallelism and before anything wraps the layers.
    """
    base_dtype = dtype if lora.base_dtype == "training" else TORCH_DTYPE_MAP[lora.base_dtype]
    _freeze(model, base_dtype)
    for block in blocks_of(model):
        for part in block.row.parts:
            if part.is_target and part.target in lora.target_modules:
                _adapt(block.get_submodule(part.name), lora, dtype)


def _freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces all parameters with frozen ones of ``dtype``. Shared parameters stay shared."""
    frozen: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            assert parameter.is_meta, "weights that have memory would be lost"
            if parameter not in frozen:
                frozen[parameter] = nn.Parameter(
                    torch.empty_like(parameter, dtype=dtype), requires_grad=False
                )
            setattr(module, name, frozen[parameter])


def _adapt(linear: nn.Linear, lora: LoRA, dtype: torch.dtype) -> None:
    # Only the class is changed, because tensor parallelism has put hooks on the module.
    store = getattr(linear, "store", None)
    linear.__class__ = AdaptedLinear
    assert isinstance(linear, AdaptedLinear)
    linear.lora_scale, linear.is_adapted = lora.alpha / lora.rank, True
    size_in, size_out, weight = linear.in_features, linear.out_features, linear.weight
    by_rows, by_columns = _placements(weight)
    for name, shape, placements in (
        ("lora_A", (lora.rank, size_in), by_columns),
        ("lora_B", (size_out, lora.rank), by_rows),
    ):
        factor = nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=dtype)
        if isinstance(weight, DTensor):
            factor.weight = nn.Parameter(_divided(factor.weight, weight, placements))
        setattr(linear, name, factor if store is None else DeferredLinear(factor, store))


def _placements(weight: torch.Tensor) -> tuple[list[Placement], list[Placement]]:
    placements = weight.placements if isinstance(weight, DTensor) else ()
    return (
        [Shard(0) if p.is_shard(0) else Replicate() for p in placements],
        [Shard(1) if p.is_shard(1) else Replicate() for p in placements],
    )


def _divided(whole: torch.Tensor, like: DTensor, placements: Sequence[Placement]) -> DTensor:
    mesh, local = like.device_mesh, list(whole.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            # As torch.chunk divides; nobody's part is empty, since the target's is not.
            part = -(-local[placement.dim] // mesh.size(axis))
            begin = min(mesh.get_local_rank(axis) * part, local[placement.dim])
            local[placement.dim] = min(part, local[placement.dim] - begin)
    return DTensor.from_local(
        torch.empty(local, dtype=whole.dtype, device="meta"), mesh, placements,
        run_check=False, shape=whole.shape, stride=whole.stride(),
    )  # fmt: skip


def begin_adapters(model_parts: Sequence[nn.Module], seed: int | None) -> None:
    """Initializes the adapters. Each ``A`` has its own generator, so that values do not depend on the layout."""
    for name, parameter in adapters_of(model_parts).items():
        local = local_tensor(parameter)
        if name.endswith(FACTORS[1]):
            local.zero_()
        elif local.numel():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed or 0} {name}".encode()))
            whole = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)  # as PEFT
            local.copy_(local_block(parameter).of(whole))


def adapters_of(model_parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    return {
        name: parameter
        for name, parameter in named_parameters(list(model_parts))
        if is_adapter(name)
    }


@contextmanager
def adapters_off(model_parts: Sequence[nn.Module]) -> Iterator[None]:
    adapted = [m for p in model_parts for m in p.modules() if isinstance(m, AdaptedLinear)]
    for module in adapted:
        module.is_adapted = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_adapted = True


def lora_scale(adapter: StateDictAdapter) -> float:
    return getattr(getattr(adapter, "model_args", None), "lora_scale", 0.0)


class AdapterMerge:
    """Adds adapters to their targets in a stream of whole parameters.

    An adapter comes after all parameters of its target's module. ``arrived / meant`` is the share of the
    change that survives rounding to the targets' dtype, measured on the first rows of each target.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self.arrived = self.meant = 0.0
        self._module = ""
        self._targets: dict[str, torch.Tensor] = {}
        self._rows: torch.Tensor | None = None

    def target(self, name: str, weight: torch.Tensor, shape: Sequence[int]) -> None:
        """Keeps a parameter until one of another module comes. :meth:`add` may change the parameter in place."""
        if module_of(name) != self._module:
            self._module, self._targets = module_of(name), {}
        self._targets[name] = weight.view(tuple(shape))

    def add(self, name: str, factor: torch.Tensor) -> None:
        """Keeps an adapter's first factor. With the second factor, adds the adapter to its target in place."""
        target = self._targets[target_of(name)]
        if name.endswith(FACTORS[0]):
            self._rows = factor
        else:
            assert self._rows is not None, f"{name} came before its other factor"
            before = target[:_MEASURED_ROWS].to(torch.float32, copy=True)
            meant = self._scale * (factor[:_MEASURED_ROWS].float() @ self._rows.float())
            target.addmm_(factor, self._rows, alpha=self._scale)
            self.arrived += float(((target[:_MEASURED_ROWS].float() - before) * meant).sum())
            self.meant += float(meant.square().sum())
            self._rows = None


def with_adapters(
    parameters: Iterator[tuple[str, torch.Tensor]], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole parameters with adapters added to copies of them. Adapters must follow their module."""
    merge = AdapterMerge(scale)
    held: dict[str, torch.Tensor] = {}
    for name, full in parameters:
        if is_adapter(name):
            if name.endswith(FACTORS[0]):
                target = target_of(name)
                held[target] = held[target].clone()  # it may share the memory of what is trained
                merge.target(target, held[target], held[target].shape)
            merge.add(name, full)
            continue
        if held and module_of(name) != module_of(next(iter(held))):
            yield from held.items()
            held = {}
        held[name] = full
    yield from held.items()


def peft_name(adapter: StateDictAdapter, name: str) -> str:
    (target,) = adapter.to_hf({target_of(name): torch.empty(0, device="meta")})
    return PEFT_PREFIX + target.removesuffix(".weight") + factor_of(name)


class PeftStateDictAdapter:
    """Renames adapters to PEFT's names as they are pushed.

    A server compares ``base_digest`` with the digest of its own base model.
    """

    def __init__(self, adapter: StateDictAdapter, base_model: str) -> None:
        self._adapter, self.base_digest = adapter, base_digest(base_model)
        self.model_args = adapter.model_args

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {peft_name(self._adapter, name): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError("adapters are pushed, and not received")


def peft_config(lora: LoRA, base_model: str) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def export_peft(
    model_parts: list[nn.Module],
    adapter: StateDictAdapter,
    lora: LoRA,
    base_model: str,
    target: Path,
    dtype: torch.dtype,
    *,
    is_writer: bool,
) -> None:
    """Writes the adapters as a PEFT directory on rank 0. Collective over all ranks."""
    parameters = dict(named_parameters(model_parts))
    assemblies = [a for a in agree_on_assembly(parameters, adapter) if is_adapter(a.name)]
    shards = {name: local_tensor(p) for name, p in parameters.items() if is_adapter(name)}
    device = local_tensor(next(iter(parameters.values()))).device
    collected = Collector([assemblies], dtype, device, group=None).collect(shards)
    tensors = {
        peft_name(adapter, name): full.to("cpu").contiguous().clone() for name, full in collected
    }
    if is_writer:
        with whole_folder(target) as partial:
            config = json.dumps(peft_config(lora, base_model), indent=2, allow_nan=False)
            (partial / "adapter_config.json").write_text(config)
            save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields a folder that replaces ``target`` once it is complete, and is removed after an error."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    partial.mkdir()
    ordinary = partial.stat().st_mode & 0o666
    try:
        yield partial
        # The safetensors library lets only the owner read its files; here umask decides.
        for file in partial.glob("*.safetensors"):
            file.chmod(ordinary)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # remains of a full disk
