# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the schedule that trains the pipeline stages of a rank."""

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from torchtitan.grpo.pipeline.assumed_costs import assumed_costs
from torchtitan.grpo.pipeline.stages import schedule_of
from torchtitan.grpo.pipeline.table_schedule import TableSchedule


def build_schedule(
    config: JobConfig, stages: list[PipelineStage], loss: Callable[..., Any]
) -> TableSchedule:
    """Returns the schedule that trains this rank's stages.

    Args:
        config: Configuration of the run, checked.
        stages: Stages of this rank, as `split.py` makes them.
        loss: Called on the rank of the last stage, once a microbatch.
    """
    row, settings = schedule_of(config.parallelism), config.parallelism
    degree = settings.pipeline_parallel_degree
    num_microbatches = (
        config.training.local_batch_size // settings.pipeline_parallel_microbatch_size
    )
    costs = assumed_costs(config, len(stages))
    table = row.make_table(degree, num_microbatches, len(stages), costs)
    total_stages = degree * len(stages)
    logger.info(
        f"The pipeline runs {num_microbatches} microbatches through {total_stages} stages with "
        f"the {'zero-bubble ' if row.is_zero_bubble else ''}schedule {row.name}."
    )
    if num_microbatches < total_stages:
        logger.warning(
            f"The pipeline has fewer microbatches ({num_microbatches}) than stages "
            f"({total_stages}), so ranks will often be idle. Raise training.local_batch_size or "
            "lower parallelism.pipeline_parallel_microbatch_size."
        )
    return TableSchedule(stages, table, costs, loss)
