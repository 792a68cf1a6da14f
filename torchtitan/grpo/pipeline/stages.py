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

_ENDS_ONE_AT_A_TIME = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")


def stage_modules(settings: Parallelism, num_layers: int) -> list[list[str]]:
    """For each stage the names of its modules.

    Args:
        settings: ``[parallelism]``; ``module_fqns_per_model_part`` says it outright, otherwise
            layers are dealt evenly, embedding and output layer counting as some.
        num_layers: Of the model.

    Raises:
        ValueError: There are more stages than layers for them, or what is said outright is
            not the whole model, or not so many stages as the schedule has.
    """
    if settings.module_fqns_per_model_part is not None:
        _check_said(settings, num_layers)
        return settings.module_fqns_per_model_part
    return generate_llm_fqn_per_model_part(
        num_stages(settings, num_layers),
        num_layers,
        settings.pipeline_parallel_first_stage_less_layers,
        settings.pipeline_parallel_last_stage_less_layers,
    )


def _check_said(settings: Parallelism, num_layers: int) -> None:
    """What no stage names would be left out of the model, and nothing else would notice."""
    said = settings.module_fqns_per_model_part
    assert said is not None
    layers = [f"layers.{i}" for i in range(num_layers)]
    whole = ["tok_embeddings", *layers, "norm", "output"]
    given = [name for stage in said for name in stage]
    if given != whole:
        missing = [name for name in whole if name not in given]
        raise ValueError(
            "parallelism.module_fqns_per_model_part must name tok_embeddings, layers.0 to "
            f"layers.{num_layers - 1}, norm and output once each, in this order, got {said}"
            + (f", which lacks {', '.join(missing)}." if missing else ".")
        )
    degree, schedule = settings.pipeline_parallel_degree, settings.pipeline_parallel_schedule
    if not all(said) or not _fits(len(said), degree, schedule):
        raise ValueError(
            f"parallelism.module_fqns_per_model_part must be stages with something in each: "
            f"{schedule} needs {_wanted(schedule)} on each of {degree} ranks, got {len(said)} "
            f"stages, {said}."
        )


def _fits(stages: int, degree: int, schedule: str) -> bool:
    """Whether a schedule can run so many stages on so many ranks."""
    per_rank, rest = divmod(stages, degree)
    if is_single_stage(schedule):
        return stages == degree
    return rest == 0 and (per_rank == 2 if _is_v(schedule) else per_rank >= 2)


def _wanted(schedule: str) -> str:
    if is_single_stage(schedule):
        return "one stage"
    return "two stages" if _is_v(schedule) else "two or more stages, equally many,"


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
    if not _fits(stages, settings.pipeline_parallel_degree, settings.pipeline_parallel_schedule):
        raise ValueError(
            "parallelism.pipeline_parallel_layers_per_stage "
            f"({settings.pipeline_parallel_layers_per_stage}) makes {stages} stages of {layers} "
            f"layers (embedding and output included); {settings.pipeline_parallel_schedule} needs "
            f"{_wanted(settings.pipeline_parallel_schedule)} on each of "
            f"{settings.pipeline_parallel_degree} ranks."
        )
    return stages


def is_single_stage(schedule: str) -> bool:
    """True of GPipe and 1F1B, which hold one stage a rank."""
    return issubclass(get_schedule_class(schedule), PipelineScheduleSingle)


def ends_one_at_a_time(settings: Parallelism) -> bool:
    """True where the last stage finishes a microbatch before it begins the next.

    GPipe begins all of them first, and InterleavedZeroBubble as many as there are ranks before
    it comes to the gradients of weights. Whole models take one after the other.
    """
    if settings.pipeline_parallel_degree == 1:
        return True
    return settings.pipeline_parallel_schedule in _ENDS_ONE_AT_A_TIME


def _is_v(schedule: str) -> bool:
    """True where a rank holds a stage of the way down and its opposite of the way up."""
    return issubclass(get_schedule_class(schedule), ScheduleZBVZeroBubble)


def stage_ranks(settings: Parallelism, total_stages: int) -> list[int]:
    """For each stage the pipeline rank that holds it."""
    is_v = _is_v(settings.pipeline_parallel_schedule)
    mapping = generate_stage_to_rank_mapping(
        settings.pipeline_parallel_degree, total_stages, style="v" if is_v else "loop"
    )
    return [mapping[stage] for stage in range(total_stages)]
