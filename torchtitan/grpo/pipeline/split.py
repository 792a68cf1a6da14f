# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Splits a whole model on the meta device into the pipeline stages of each rank."""

import torch
import torch.nn as nn

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.deferred_experts import defer_experts
from torchtitan.grpo.models.deferred_linear import defer_linears
from torchtitan.grpo.models.parallelize import compiles_model, parallelize
from torchtitan.grpo.models.split_compile import SplitBackend
from torchtitan.grpo.models.tied_embeddings import hold_output_embedding, is_tied
from torchtitan.grpo.models.weight_grads import WeightGradients
from torchtitan.grpo.pipeline.deferred_stage import DeferredStage
from torchtitan.grpo.pipeline.early_recompute import EarlyRecompute, num_early_blocks
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.stages import schedule_of, stage_modules
from torchtitan.grpo.upstream.parallelism import ParallelDims, pipeline_module_split

# Upstream derives the placement of stages from the name of a schedule of torch. For a schedule that
# torch does not have, the name of a schedule with the same placement is passed.
_PLACED_LIKE = {"loop": "Interleaved1F1B", "v": "ZBVZeroBubble"}


def split_model(
    model: nn.Module, dims: ParallelDims, config: JobConfig, device: torch.device
) -> tuple[list[LeanStage], list[nn.Module]]:
    """Returns this rank's stages and their modules, with all other parallelisms applied.

    Args:
        model: The whole model, on the meta device.
        dims: Parallel dimensions of the run.
        config: Configuration of the run. ``[parallelism]`` determines which rank holds which layers.
        device: Device of the activations that stages send to each other.
    """
    num_layers = len(model.layers)  # pyright: ignore[reportArgumentType]
    modules = stage_modules(config.parallelism, num_layers)
    placed_like = _PLACED_LIKE[schedule_of(config.parallelism).placement]
    stages, parts = pipeline_module_split(model, dims.get_mesh("pp"), placed_like, device, modules)
    store, early_blocks = _store_of(config), num_early_blocks(config)
    backend = None
    if store is not None and compiles_model(config):
        # All stages use one backend, so that they share compiled code.
        backend = SplitBackend(store)
    built: list[LeanStage] = []
    for stage, part in zip(stages, parts, strict=True):
        if stage.is_last and is_tied(part):
            hold_output_embedding(part)
        if store is not None:
            # This must happen before the layers are wrapped in checkpoints and sharded.
            if backend is None:
                defer_linears(part, store)
            defer_experts(part, store)
        stage.submod = parallelize(part, dims, config, backend)
        built.append(LeanStage.like(stage) if store is None else DeferredStage(stage, store))
        if early_blocks != 0:
            built[-1].early = EarlyRecompute(stage.submod, early_blocks)
    return built, parts


def _store_of(config: JobConfig) -> WeightGradients | None:
    """Returns a store of weight gradients if the schedule splits backward passes."""
    if not schedule_of(config.parallelism).is_zero_bubble:
        return None
    bound = config.grpo.max_pending_weight_grads_gib
    return WeightGradients(None if bound < 0 else int(bound * 2**30))
