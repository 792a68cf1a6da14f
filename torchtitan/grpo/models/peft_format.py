# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""PEFT's names of adapters, and directories of adapters that PEFT and servers load."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors.torch import save_file

from torchtitan.grpo.config import LoRA
from torchtitan.grpo.models.collect import Collector, agree_on_assembly
from torchtitan.grpo.models.hf_weights import named_parameters
from torchtitan.grpo.models.shards import local_tensor
from torchtitan.grpo.upstream.state_dict import BaseStateDictAdapter
from torchtitan.grpo.weight_wire.adapter_names import PEFT_PREFIX, factor_of, is_adapter, target_of
from torchtitan.grpo.weight_wire.adapters import base_digest


def peft_name(adapter: BaseStateDictAdapter, name: str) -> str:
    """Returns PEFT's name of an adapter's parameter.

    Args:
        adapter: State-dict adapter of the model family.
        name: Native name of the parameter.
    """
    (target,) = adapter.to_hf({target_of(name): torch.empty(0, device="meta")})
    return PEFT_PREFIX + target.removesuffix(".weight") + factor_of(name)


class AdapterNames(BaseStateDictAdapter):
    """Converts the parameters of adapters alone, to PEFT's names, for a push of adapters.

    Args:
        adapter: State-dict adapter of the model family.
        base_model: Directory of the base model.

    Attributes:
        base_digest: Digest by which a server finds out that it has another base.
    """

    def __init__(self, adapter: BaseStateDictAdapter, base_model: str) -> None:
        self._adapter, self.base_digest = adapter, base_digest(base_model)
        self.model_args = getattr(adapter, "model_args")  # noqa: B009

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the tensors under PEFT's names. All of them must be of adapters."""
        return {peft_name(self._adapter, name): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Is not needed: a push only sends."""
        raise NotImplementedError("adapters are pushed, and not received")

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        """Is not needed, as :meth:`from_hf`."""
        raise NotImplementedError("adapters are pushed, and not received")


def peft_config(lora: LoRA, base_model: str) -> dict[str, object]:
    """Returns the contents of ``adapter_config.json``.

    Args:
        lora: The table ``[lora]``.
        base_model: Directory or name of the model that the adapters change.
    """
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
    adapter: BaseStateDictAdapter,
    lora: LoRA,
    base_model: str,
    target: Path,
    dtype: torch.dtype,
    *,
    is_writer: bool,
) -> None:
    """Writes the adapters as a PEFT directory. All ranks call it, and rank 0 writes.

    Args:
        model_parts: Parts of the model that this rank holds.
        adapter: State-dict adapter of the model family.
        lora: The table ``[lora]``.
        base_model: Directory or name of the model that the adapters change.
        target: Directory to create. An existing one is replaced.
        dtype: Data type of the weights that are written.
        is_writer: True on rank 0.
    """
    parameters = dict(named_parameters(model_parts))
    assemblies = [a for a in agree_on_assembly(parameters, adapter) if is_adapter(a.name)]
    shards = {name: local_tensor(p) for name, p in parameters.items() if is_adapter(name)}
    device = local_tensor(next(iter(parameters.values()))).device
    collected = Collector([assemblies], dtype, device, group=None).collect(shards)
    tensors = {
        peft_name(adapter, name): full.to("cpu").contiguous().clone() for name, full in collected
    }
    if is_writer:
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            config = partial / "adapter_config.json"
            config.write_text(json.dumps(peft_config(lora, base_model), indent=2, allow_nan=False))
            weights = partial / "adapter_model.safetensors"
            save_file(tensors, weights, metadata={"format": "pt"})
            # The safetensors library lets the owner alone read its files; umask decides about others.
            weights.chmod(config.stat().st_mode)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # what found no room
