# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the schedules that run the pipeline stages of a rank."""

from collections.abc import Callable
from typing import Any

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.pipeline.assumed_costs import assumed_costs
from torchtitan.grpo.pipeline.choice import costs_for
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.stages import schedule_of, stage_ranks
from torchtitan.grpo.pipeline.table_schedule import TableSchedule
from torchtitan.grpo.pipeline.tables.costs import Costs
from torchtitan.grpo.pipeline.tables.plain import forward_only
from torchtitan.grpo.system.logs import logger


def build_schedule(
    config: JobConfig,
    stages: list[LeanStage],
    loss: Callable[..., Any],
    measured: Costs | None = None,
) -> TableSchedule:
    """Returns the schedule that trains this rank's stages.

    Args:
        config: The checked configuration of the run.
        stages: Stages of this rank, as `split.py` makes them.
        loss: Called on the rank of the last stage once per microbatch.
        measured: Costs that ``auto`` has measured. None uses typical costs.
    """
    row, degree = schedule_of(config.parallelism), config.parallelism.pipeline_parallel_degree
    if measured is None:
        costs = assumed_costs(config, len(stages))
    else:
        costs = costs_for(row, measured, degree)
    logger.info(
        f"The pipeline has {degree * len(stages)} stages on {degree} ranks and the "
        f"{'zero-bubble ' if row.is_zero_bubble else ''}schedule {row.name}."
    )
    schedule = TableSchedule(
        stages, lambda count: row.make_table(degree, count, len(stages), costs), costs, loss
    )
    if config.grpo.pipeline_offload != 0:
        schedule.offload(config.grpo.pipeline_offload)
    return schedule


def build_forward_schedule(config: JobConfig, stages: list[LeanStage]) -> TableSchedule:
    """Returns a schedule that runs forward passes through the modules of ``stages``."""
    ranks = tuple(stage_ranks(config.parallelism, stages[0].num_stages))
    return TableSchedule(
        [LeanStage.like(stage) for stage in stages],
        lambda count: forward_only(ranks, count),
        assumed_costs(config, len(stages)),
    )
