# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a whole model on the meta device to this rank's pipeline stages."""

import math

import torch
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Parallelism
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import (
    generate_llm_fqn_per_model_part,
    pipeline_module_split,
)

from torchtitan.grpo.models.parallelize import parallelize


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
    settings = config.parallelism
    modules = settings.module_fqns_per_model_part
    if modules is None:
        num_layers = len(model.layers)  # pyright: ignore[reportArgumentType]
        modules = generate_llm_fqn_per_model_part(
            num_stages(settings, num_layers),
            num_layers,
            settings.pipeline_parallel_first_stage_less_layers,
            settings.pipeline_parallel_last_stage_less_layers,
        )
    stages, parts = pipeline_module_split(
        model, dims.get_mesh("pp"), settings.pipeline_parallel_schedule, device, modules
    )
    for stage, part in zip(stages, parts, strict=True):
        stage.submod = parallelize(part, dims, config)
    return stages, parts


def num_stages(settings: Parallelism, num_layers: int) -> int:
    """Stages of the whole pipeline.

    Raises:
        ValueError: ``parallelism.pipeline_parallel_layers_per_stage`` does not fit.
    """
    is_single = is_single_stage(settings.pipeline_parallel_schedule)
    if settings.pipeline_parallel_layers_per_stage is None:
        return settings.pipeline_parallel_degree * (1 if is_single else 2)
    # The embedding and the output layer count as so many layers.
    layers = (
        num_layers
        + settings.pipeline_parallel_first_stage_less_layers
        + settings.pipeline_parallel_last_stage_less_layers
    )
    stages = math.ceil(layers / settings.pipeline_parallel_layers_per_stage)
    per_rank, rest = divmod(stages, settings.pipeline_parallel_degree)
    if rest or (per_rank == 1) != is_single:
        raise ValueError(
            "parallelism.pipeline_parallel_layers_per_stage "
            f"({settings.pipeline_parallel_layers_per_stage}) makes {stages} stages of {layers} "
            f"layers (embedding and output included) for "
            f"{settings.pipeline_parallel_degree} ranks; "
            f"{settings.pipeline_parallel_schedule} needs "
            f"{'one stage' if is_single else 'two or more stages'} on each rank, equally many."
        )
    return stages


def is_single_stage(schedule: str) -> bool:
    """True of GPipe and 1F1B, which hold one stage a rank."""
    return issubclass(get_schedule_class(schedule), PipelineScheduleSingle)


def stage_ranks(settings: Parallelism, total_stages: int) -> list[int]:
    """For each stage the pipeline rank that holds it."""
    is_v = issubclass(get_schedule_class(settings.pipeline_parallel_schedule), _V_SCHEDULES)
    mapping = generate_stage_to_rank_mapping(
        settings.pipeline_parallel_degree, total_stages, style="v" if is_v else "loop"
    )
    return [mapping[stage] for stage in range(total_stages)]


_V_SCHEDULES = (ScheduleZBVZeroBubble,)
