# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares the weights of a Hugging Face directory with its config.json, without loading them."""

from pathlib import Path

import torch

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.models.hf_weights import check_hf_weights
from torchtitan.grpo.training.model_spec import hf_train_spec


def check_weights(config: JobConfig, model: HFModel) -> int:
    """Builds the model without memory and compares names and shapes with the safetensors files.

    The weights of the reference model are compared as well.

    Args:
        config: Configuration of the run.
        model: The model. Building it changes its arguments.

    Returns:
        Number of tensors of the model.

    Raises:
        ModelError: If a tensor is missing or has another shape.
    """
    spec, args = hf_train_spec(model, config, config.training.steps), model.model_args
    args.update_from_config(config)
    with torch.device("meta"):
        built = spec.model_cls(args)
    assert spec.state_dict_adapter is not None
    reference = config.grpo.ref_model_path
    if config.grpo.kl_coef > 0 and reference is not None:
        adapter = spec.state_dict_adapter(args, reference)
        check_hf_weights(built, adapter, Path(reference), setting="grpo.ref_model_path")
    adapter = spec.state_dict_adapter(args, str(model.path))
    return check_hf_weights(built, adapter, model.path, setting="model.hf_assets_path")
