# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The division of a model into pipeline stages, and the ranks of the stages."""

import itertools
import math
from collections.abc import Callable

from torchtitan.grpo.config.frame import Parallelism
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.blocks.parts import GroupedAttention
from torchtitan.grpo.pipeline.schedules import AUTO, SCHEDULES, Schedule, measured_with
from torchtitan.grpo.pipeline.tables.actions import ranks_of_stages


def schedule_of(settings: Parallelism) -> Schedule:
    name = settings.pipeline_parallel_schedule
    if name not in SCHEDULES:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule must be one of {', '.join(SCHEDULES)}, got "
            f"{name!r}."
        )
    return SCHEDULES[name]


def stage_modules(settings: Parallelism, num_layers: int) -> list[list[str]]:
    """Returns the names of each stage's modules, from the configuration or by an even division.

    Under Helix, a stage is a part with weights, and its modules are parts of two layers. In an even
    division, the embedding counts as ``pipeline_parallel_first_stage_less_layers`` layers, and the
    output layer as ``pipeline_parallel_last_stage_less_layers``. Raises ValueError if the division
    is impossible, incomplete or unfit for the schedule.
    """
    if schedule_of(settings).divides_layers:
        _check_parts(settings, num_layers)
        return _part_modules(num_layers)
    if settings.module_fqns_per_model_part is not None:
        _check_listed_modules(settings, num_layers)
        return settings.module_fqns_per_model_part

    return _even_division(
        num_stages(settings, num_layers),
        num_layers,
        settings.pipeline_parallel_first_stage_less_layers,
        settings.pipeline_parallel_last_stage_less_layers,
    )


def _even_division(
    num_stages: int, num_layers: int, first_less: int, last_less: int
) -> list[list[str]]:
    """Divides layers evenly, counting the embedding and the output layer as layers too.

    They count as ``first_less`` and ``last_less`` layers, by which the first and the last stage have
    fewer. The layers of a remainder go to the earliest stages, one each.
    """
    per_stage, rest = divmod(num_layers + first_less + last_less, num_stages)
    if num_stages > 1 and (per_stage == 0 or max(first_less, last_less) > per_stage):
        raise ValueError(
            f"Each of the {num_stages} pipeline stages must get at least one layer, and embedding and "
            f"output layer, which count as {first_less} and {last_less} layers "
            "(parallelism.pipeline_parallel_first_stage_less_layers, _last_stage_less_layers), must fit "
            f"in one, got {num_layers} layers. Lower the number of stages, or what the two count."
        )
    counts = [per_stage + (stage < rest) for stage in range(num_stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    layers = iter([f"layers.{layer}" for layer in range(num_layers)])
    stages = [list(itertools.islice(layers, count)) for count in counts]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def _part_modules(num_layers: int) -> list[list[str]]:
    """Returns the modules of each of Helix's ``num_layers`` + 1 parts with weights."""
    before = ("attention_norm", *GroupedAttention.before)
    after = (*GroupedAttention.after, "ffn_norm", "feed_forward")
    parts: list[list[str]] = [[] for _ in range(num_layers + 1)]
    parts[0].append("tok_embeddings")
    for layer in range(num_layers):
        parts[layer] += [f"layers.{layer}.{name}" for name in before]
        parts[layer + 1] += [f"layers.{layer}.{name}" for name in after]
    parts[-1] += ["norm", "output"]
    return parts


def _check_listed_modules(settings: Parallelism, num_layers: int) -> None:
    """Checks what upstream does not: a module in no stage would be neither trained nor sent to servers."""
    listed = settings.module_fqns_per_model_part
    assert listed is not None
    layers = [f"layers.{i}" for i in range(num_layers)]
    whole = ["tok_embeddings", *layers, "norm", "output"]
    given = [name for stage in listed for name in stage]
    if given != whole:
        missing = [name for name in whole if name not in given]
        raise ValueError(
            "parallelism.module_fqns_per_model_part must name tok_embeddings, layers.0 to "
            f"layers.{num_layers - 1}, norm and output once each, in this order, got {listed}"
            + (f", which lacks {', '.join(missing)}." if missing else ".")
        )
    degree, schedule = settings.pipeline_parallel_degree, schedule_of(settings)
    if not all(listed) or not schedule.allows_stages(len(listed), degree):
        raise ValueError(
            "parallelism.module_fqns_per_model_part must list stages with at least one module "
            f"each, and {schedule.name} needs {schedule.stages_in_words} on each of {degree} "
            f"ranks, got {len(listed)} stages: {listed}."
        )


def _check_parts(settings: Parallelism, num_layers: int) -> None:
    for key in ("pipeline_parallel_layers_per_stage", "module_fqns_per_model_part"):
        if getattr(settings, key) is not None:
            raise ValueError(
                f"parallelism.{key} must be left out with the schedule Helix, got "
                f"{getattr(settings, key)}: it divides each layer."
            )
    degree = settings.pipeline_parallel_degree
    if num_layers + 1 < degree:
        raise ValueError(
            f"Helix divides {num_layers} layers into {num_layers + 1} parts with weights, which must "
            f"be at least as many as the {degree} ranks."
        )


def num_stages(settings: Parallelism, num_layers: int) -> int:
    """Returns the total number of pipeline stages. Raises ValueError if the schedule does not allow it."""
    schedule, degree = schedule_of(settings), settings.pipeline_parallel_degree
    if settings.pipeline_parallel_layers_per_stage is None:
        return degree * schedule.stages_per_rank
    layers = (
        num_layers
        + settings.pipeline_parallel_first_stage_less_layers
        + settings.pipeline_parallel_last_stage_less_layers
    )
    stages = math.ceil(layers / settings.pipeline_parallel_layers_per_stage)
    if not schedule.allows_stages(stages, degree):
        raise ValueError(
            "parallelism.pipeline_parallel_layers_per_stage "
            f"({settings.pipeline_parallel_layers_per_stage}) divides {layers} layers (including the "
            f"embedding and the output layer) into {stages} stages, but {schedule.name} needs "
            f"{schedule.stages_in_words} on each of {degree} ranks."
        )
    return stages


def fixes_stages(settings: Parallelism) -> bool:
    return (
        settings.module_fqns_per_model_part is not None
        or settings.pipeline_parallel_layers_per_stage is not None
    )


def ends_one_at_a_time(settings: Parallelism) -> bool:
    """Returns whether the last stage, or undivided model, runs a microbatch backward before the next forward."""
    if settings.pipeline_parallel_degree == 1:
        return True
    return schedule_of(settings).finishes_each_microbatch


def stage_ranks(settings: Parallelism, total_stages: int) -> list[int]:
    """Returns each stage's pipeline rank. For ``auto``, this is the rank during its measurements."""
    degree, schedule = settings.pipeline_parallel_degree, schedule_of(settings)
    if schedule.divides_layers:
        return [part % degree for part in range(total_stages)]
    per_rank = total_stages // degree
    if schedule.name == AUTO:
        schedule = measured_with(per_rank)
    return list(ranks_of_stages(degree, per_rank, schedule.placement))


def trains_together(config: JobConfig) -> bool:
    """Returns whether one pass of a pipeline trains both the policy and the critic."""
    settings, grpo = config.parallelism, config.grpo
    return (
        config.has_critic
        and settings.pipeline_parallel_degree > 1
        and not schedule_of(settings).divides_layers
        and grpo.pipeline_fill_gaps
        and grpo.pipeline_offload == 0  # whose plan knows one model
    )


def rank_of_parameter(settings: Parallelism, num_layers: int) -> Callable[[str], int]:
    """Returns a function from a parameter's name to the pipeline rank that holds it."""
    stages = stage_modules(settings, num_layers)
    places = zip(stages, stage_ranks(settings, len(stages)), strict=True)
    ranks = {module: rank for modules, rank in places for module in modules}

    def rank_of(name: str) -> int:
        while name not in ranks:
            name, _, rest = name.rpartition(".")
            assert rest, f"no stage holds {name}"
        return ranks[name]

    return rank_of
