# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes a Hugging Face directory a model that torchtitan's Trainer can build."""

from dataclasses import replace

import torch
import torch.nn as nn
import torchtitan.protocols.train_spec as train_specs
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools import utils

from torchtitan.grpo.config_manager import JobConfig
from torchtitan.grpo.device import prepare_fsdp_for_gloo
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.models.hf_weights import load_hf_weights
from torchtitan.grpo.models.packed_attention import PackedAttentionKind, install_packed_attention
from torchtitan.grpo.models.tied_embeddings import parallelize_tied_qwen3
from torchtitan.grpo.observe.metrics import build_grpo_metrics_processor


def hf_train_spec(model: HFModel, flavor: str) -> TrainSpec:
    """Upstream's spec of the model family, for this directory and for rollouts as data."""
    tied = getattr(model.model_args, "enable_weight_tying", False)
    return replace(
        model.train_spec,
        parallelize_fn=parallelize_tied_qwen3 if tied else model.train_spec.parallelize_fn,
        model_args={flavor: model.model_args},
        # Rollouts are the data, and their text is never tokenised again.
        build_dataloader_fn=None,
        build_tokenizer_fn=None,
        build_validator_fn=None,
        build_metrics_processor_fn=build_grpo_metrics_processor,
    )


def register_hf_model(model: HFModel, config: JobConfig) -> None:
    """Registers the directory under the name and flavor that ``[model]`` carries."""
    spec = hf_train_spec(model, config.model.flavor)
    train_specs.register_train_spec(config.model.name, spec)


def prepare_model_parts(
    model_parts: list[nn.Module], attention: PackedAttentionKind, device_type: str
) -> None:
    """What a model parallelised by upstream still needs here."""
    install_packed_attention(model_parts, attention)
    if device_type == "cpu":
        prepare_fsdp_for_gloo(model_parts)


def build_reference(
    model: HFModel,
    config: JobConfig,
    parallel_dims: ParallelDims,
    device: torch.device,
    attention: PackedAttentionKind,
) -> nn.Module:
    """A frozen model, sharded like the policy, with ``grpo.ref_model_path``'s weights."""
    spec = train_specs.get_train_spec(config.model.name)
    dtype = TORCH_DTYPE_MAP[config.training.dtype]
    with torch.device("meta"), utils.set_default_dtype(dtype):
        reference = spec.model_cls(model.model_args)
    reference = spec.parallelize_fn(reference, parallel_dims, config)
    reference.to_empty(device=device)
    with torch.no_grad():
        reference.init_weights()  # pyright: ignore[reportCallIssue]  (rotary tables)
    prepare_model_parts([reference], attention, device.type)
    assert spec.state_dict_adapter is not None
    path = config.grpo.ref_model_path or config.model.hf_assets_path
    load_hf_weights([reference], spec.state_dict_adapter(model.model_args, path), path)
    return reference.eval().requires_grad_(False)
