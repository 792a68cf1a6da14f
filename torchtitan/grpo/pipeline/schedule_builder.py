# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the schedule that trains the pipeline stages of a rank."""

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineSchedule
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from torchtitan.grpo.pipeline.stages import schedule_of


def build_schedule(
    config: JobConfig, stages: list[PipelineStage], loss: Callable[..., Any]
) -> _PipelineSchedule:
    """Returns the schedule that trains this rank's stages.

    Upstream's function of this purpose knows torch's schedules only. This one takes the class
    from the schedule's row.

    Args:
        config: Configuration of the run, checked.
        stages: Stages of this rank, as `split.py` makes them.
        loss: Called on the rank of the last stage, once a microbatch.
    """
    row, settings = schedule_of(config.parallelism), config.parallelism
    num_microbatches = (
        config.training.local_batch_size // settings.pipeline_parallel_microbatch_size
    )
    schedule_class = row.load_class()
    is_single = issubclass(schedule_class, PipelineScheduleSingle)
    # Gradients are sums: the loss has been divided by the number of trained tokens already.
    schedule = schedule_class(
        stages[0] if is_single else stages,
        n_microbatches=num_microbatches,
        loss_fn=loss,
        scale_grads=False,
    )
    total_stages = settings.pipeline_parallel_degree * len(stages)
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
    return schedule
