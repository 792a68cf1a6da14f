# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares the weights of a Hugging Face directory with its config.json, without loading them."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.models.hf_weights import check_hf_weights
from torchtitan.grpo.models.lora import add_adapters
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.training.model_spec import hf_train_spec
from torchtitan.grpo.upstream.state_dict import BaseStateDictAdapter


def check_weights(config: JobConfig, model: HFModel) -> tuple[int, list[str]]:
    """Compares the safetensors files of model and reference with a model without memory.

    Returns the number of tensors, and warnings of unread ones. Raises ModelError if a tensor is
    missing, quantized, in an unclear file or of another shape, or if a tied model has another
    output layer.
    """
    built, adapter_of = build_without_memory(config, copy.deepcopy(model))
    reference, notes = config.grpo.ref_model_path, []
    if config.grpo.kl_coef > 0 and reference is not None:
        adapter = adapter_of(reference)
        _, notes = check_hf_weights(built, adapter, Path(reference), setting="grpo.ref_model_path")
    adapter = adapter_of(str(model.path))
    number, own = check_hf_weights(built, adapter, model.path, setting="model.hf_assets_path")
    return number, own + notes


def parameter_shapes(config: JobConfig, model: HFModel) -> dict[str, tuple[int, ...]]:
    built, _ = build_without_memory(config, copy.deepcopy(model))
    if config.lora.rank:
        add_adapters(built, config.lora, torch.float32)
    return {name: tuple(p.shape) for name, p in named_parameters([built])}


def build_without_memory(
    config: JobConfig, model: HFModel
) -> tuple[nn.Module, Callable[[str], BaseStateDictAdapter]]:
    """Returns the model on the meta device, whose arguments it changes, and a maker of adapters."""
    spec, args = hf_train_spec(model, config, config.training.steps), model.model_args
    args.update_from_config(config)
    with torch.device("meta"):
        built = spec.model_cls(args)
    adapter = spec.state_dict_adapter
    assert adapter is not None
    return built, lambda path: adapter(args, path)
