# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the pipeline stages of each rank from a model on the meta device, and their schedules."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.decoder import hold_output_embedding, is_tied
from torchtitan.grpo.models.helix import AttentionPart, HelixPart, helix_part
from torchtitan.grpo.models.packed_model import PackedModel
from torchtitan.grpo.models.parallelize import parallelize
from torchtitan.grpo.models.weight_grads import WeightGradients, defer_experts, defer_linears
from torchtitan.grpo.pipeline.choice import assumed_costs, assumed_part_costs, costs_for
from torchtitan.grpo.pipeline.helix_schedule import HelixSchedule
from torchtitan.grpo.pipeline.lean_stage import (
    DeferredStage,
    EarlyRecompute,
    LeanStage,
    num_early_blocks,
)
from torchtitan.grpo.pipeline.stages import schedule_of, stage_modules, stage_ranks, trains_together
from torchtitan.grpo.pipeline.table_schedule import TableSchedule, second_offset
from torchtitan.grpo.pipeline.tables.actions import Costs, Table
from torchtitan.grpo.pipeline.tables.fused import opposite
from torchtitan.grpo.pipeline.tables.helix import helix
from torchtitan.grpo.pipeline.tables.rules import forward_only
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.upstream.parallelism import ParallelDims

AnySchedule = TableSchedule | HelixSchedule


def split_model(
    model: nn.Module,
    dims: ParallelDims,
    config: JobConfig,
    device: torch.device,
    *,
    is_second: bool = False,
) -> tuple[list[LeanStage], list[nn.Module]]:
    """Returns this rank's parallelized stages of a model on the meta device, and their modules.

    With ``is_second``, the stages can be trained in one pass with those of another model.
    """
    num_layers = len(model.layers)  # pyright: ignore[reportArgumentType]
    if schedule_of(config.parallelism).divides_layers:
        return _split_layers(model, dims, config, device)
    modules = stage_modules(config.parallelism, num_layers)
    mesh = dims.get_mesh("pp")
    rank = mesh.get_local_rank()
    if is_second and schedule_of(config.parallelism).turns_second:
        rank = mesh.size() - 1 - rank
    numbers = [
        i for i, own in enumerate(stage_ranks(config.parallelism, len(modules))) if own == rank
    ]
    parts = [_with_modules(model, modules[number]) for number in numbers]
    stages = [
        PipelineStage(part, number, len(modules), device, group=mesh.get_group("pp"))
        for number, part in zip(numbers, parts, strict=True)
    ]
    offset = second_offset(len(modules)) if is_second else 0
    store, early_blocks = _store_of(config), num_early_blocks(config)
    backend = None
    if store is not None and config.compile.enable:
        # Imported here, because it imports the compiler.
        from torchtitan.grpo.models.split_compile import SplitBackend

        backend = SplitBackend(store)  # one for all stages, so that they share compiled code
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
        if store is None:
            built.append(LeanStage.like(stage, offset))
        else:
            built.append(DeferredStage(stage, store, offset))
        if early_blocks != 0:
            built[-1].early = EarlyRecompute(stage.submod, early_blocks)
    return built, parts


def _with_modules(model: nn.Module, names: list[str]) -> nn.Module:
    """Returns a copy of a model on the meta device with these modules alone."""
    part: Any = copy.deepcopy(model)
    for name, module in list(part.named_children()):
        if isinstance(module, nn.ModuleDict):
            for key in [key for key in module if f"{name}.{key}" not in names]:
                del module[key]
        elif name not in names:
            setattr(part, name, None)
    return part


def _split_layers(
    model: nn.Module, dims: ParallelDims, config: JobConfig, device: torch.device
) -> tuple[list[LeanStage], list[nn.Module]]:
    """Returns this rank's parts with weights for Helix, without checkpoints: Helix recomputes them itself."""
    assert isinstance(model, PackedModel)
    mesh = dims.get_mesh("pp")
    stages = stage_modules(config.parallelism, len(model.layers))
    ranks = stage_ranks(config.parallelism, len(stages))
    plain = replace(
        config, activation_checkpoint=replace(config.activation_checkpoint, mode="none")
    )
    built: list[LeanStage] = []
    for number, rank in enumerate(ranks):
        if rank == mesh.get_local_rank():
            part = helix_part(model, number)
            if number == len(stages) - 1 and is_tied(part):
                hold_output_embedding(part)
            part = parallelize(part, dims, plain)
            built.append(LeanStage(part, number, len(stages), device, group=mesh.get_group("pp")))
    return built, [stage.submod for stage in built]


def _store_of(config: JobConfig) -> WeightGradients | None:
    if not schedule_of(config.parallelism).is_zero_bubble:
        return None
    bound = config.grpo.max_pending_weight_grads_gib
    # One pass of two models has gradients of both pending.
    bound *= 2**30 / (1 + trains_together(config))
    return WeightGradients(None if bound < 0 else int(bound))


def build_schedule(
    config: JobConfig,
    stages: list[LeanStage],
    loss: Callable[..., Any],
    measured: Costs | None = None,
) -> AnySchedule:
    """Builds the schedule that trains this rank's stages; ``measured`` None uses typical costs."""
    row, degree = schedule_of(config.parallelism), config.parallelism.pipeline_parallel_degree
    if row.divides_layers:
        logger.info(
            f"The pipeline has {stages[0].num_stages} parts with weights on {degree} ranks, and "
            f"attention on all of them, by the schedule {row.name}."
        )
        return helix_schedule(config, stages, loss, measured)
    assumed = assumed_costs(config, len(stages))
    costs = assumed if measured is None else costs_for(row, measured, degree)
    logger.info(
        f"The pipeline has {degree * len(stages)} stages on {degree} ranks and the "
        f"{'zero-bubble ' if row.is_zero_bubble else ''}schedule {row.name}."
    )
    is_opposite = _is_opposite(config, stages)

    def make_table(num_microbatches: int) -> Table:
        table = row.make_table(degree, num_microbatches, costs)
        return opposite(table) if is_opposite else table

    schedule = TableSchedule(stages, make_table, costs, loss)
    if config.grpo.pipeline_offload != 0:
        schedule.offload(config.grpo.pipeline_offload)
    return schedule


def helix_schedule(
    config: JobConfig,
    stages: list[LeanStage],
    loss: Callable[..., Any] | None,
    measured: Costs | None = None,
) -> HelixSchedule:
    """Builds the schedule Helix; with ``loss`` None, it runs forward passes only."""
    part, degree = stages[0].submod, config.parallelism.pipeline_parallel_degree
    assert isinstance(part, HelixPart)
    costs = measured or assumed_part_costs(config, part.model_args)
    return HelixSchedule(
        stages,
        AttentionPart(part),
        lambda count: helix(degree, count, costs, is_forward_only=loss is None),
        costs,
        loss,
        recomputes=config.activation_checkpoint.mode == "full",
        chunk_tokens=config.grpo.pipeline_chunk_tokens,
    )


def build_forward_schedule(config: JobConfig, stages: list[LeanStage]) -> AnySchedule:
    if schedule_of(config.parallelism).divides_layers:
        return helix_schedule(config, [LeanStage.like(stage) for stage in stages], None)
    num_stages = stages[0].num_stages - stages[0].offset
    table = forward_only(tuple(stage_ranks(config.parallelism, num_stages)), 1)
    ranks = (opposite(table) if _is_opposite(config, stages) else table).ranks
    return TableSchedule(
        [LeanStage.like(stage) for stage in stages],
        lambda count: forward_only(ranks, count),
        assumed_costs(config, len(stages)),
    )


def _is_opposite(config: JobConfig, stages: list[LeanStage]) -> bool:
    return stages[0].offset > 0 and schedule_of(config.parallelism).turns_second
