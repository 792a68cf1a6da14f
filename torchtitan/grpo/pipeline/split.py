# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a whole model on the meta device to this rank's pipeline stages."""

import torch
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_module_split

from torchtitan.grpo.models.parallelize import parallelize
from torchtitan.grpo.pipeline.stages import stage_modules


def split_model(
    model: nn.Module, dims: ParallelDims, config: JobConfig, device: torch.device
) -> tuple[list[PipelineStage], list[nn.Module]]:
    """This rank's stages and their modules, other parallelisms laid over each.

    Args:
        model: The whole model, on the meta device.
        dims: Of the run.
        config: Of the run; ``parallelism.pipeline_parallel_schedule`` says where stages go.
        device: Of the stages' activations.
    """
    num_layers = len(model.layers)  # pyright: ignore[reportArgumentType]
    modules = stage_modules(config.parallelism, num_layers)
    schedule = config.parallelism.pipeline_parallel_schedule
    stages, parts = pipeline_module_split(model, dims.get_mesh("pp"), schedule, device, modules)
    for stage, part in zip(stages, parts, strict=True):
        stage.submod = parallelize(part, dims, config)
    return stages, parts
