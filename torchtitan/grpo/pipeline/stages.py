# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How a model is cut into stages, and which pipeline rank holds which."""

import math

from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.config.job_config import Parallelism
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part


def stage_modules(settings: Parallelism, num_layers: int) -> list[list[str]]:
    """For each stage the names of its modules.

    Args:
        settings: ``[parallelism]``; ``module_fqns_per_model_part`` says it outright, otherwise
            layers are dealt evenly, embedding and output layer counting as some.
        num_layers: Of the model.

    Raises:
        ValueError: There are more stages than layers for them.
    """
    if settings.module_fqns_per_model_part is not None:
        return settings.module_fqns_per_model_part
    return generate_llm_fqn_per_model_part(
        num_stages(settings, num_layers),
        num_layers,
        settings.pipeline_parallel_first_stage_less_layers,
        settings.pipeline_parallel_last_stage_less_layers,
    )


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
    schedule = get_schedule_class(settings.pipeline_parallel_schedule)
    is_v = issubclass(schedule, ScheduleZBVZeroBubble)
    mapping = generate_stage_to_rank_mapping(
        settings.pipeline_parallel_degree, total_stages, style="v" if is_v else "loop"
    )
    return [mapping[stage] for stage in range(total_stages)]
