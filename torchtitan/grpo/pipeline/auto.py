# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the pipeline schedule of a run from measured times.

Before the model is built, its layers are built with random weights in two stages on each rank, and a
few microbatches of random tokens are timed. From the times of the stages, the duration of every
schedule is predicted. The schedules with the shortest predicted times are then run and measured,
because a prediction includes neither the overhead of additional stages nor the overhead of splitting
backward passes. If the configuration fixes the number of stages, that number of stages is timed, and
only schedules that can run it are considered.
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.pipeline.choice import describe, finalists, predict
from torchtitan.grpo.pipeline.draw import draw_picture, draw_text
from torchtitan.grpo.pipeline.schedules import (
    AUTO,
    SCHEDULES,
    assumed_microbatches,
    candidates,
    measured_with,
)
from torchtitan.grpo.pipeline.stages import fixes_stages, stage_modules
from torchtitan.grpo.pipeline.tables.costs import Costs
from torchtitan.grpo.pipeline.trial import Trial
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.upstream.parallelism import ParallelDims


def resolve_schedule(
    model: nn.Module, dims: ParallelDims, config: JobConfig, device: torch.device
) -> Costs | None:
    """Replaces ``auto`` in the configuration by the fastest schedule that fits.

    The function is collective over all ranks of the run. Rank 0 logs the reason for the choice, and
    writes it with pictures to ``pipeline_schedule.txt`` and ``pipeline_schedule.png`` in the run's
    folder.

    Args:
        model: The whole model, on the meta device. It is not changed.
        dims: Parallel dimensions of the run.
        config: Configuration of the run. ``parallelism.pipeline_parallel_schedule`` is changed.
        device: Device on which the stages compute.

    Returns:
        The measured costs of all stages, or None if the configuration names a schedule. There are two
        stages on each rank, unless the configuration fixes their number.
    """
    settings = config.parallelism
    if settings.pipeline_parallel_schedule != AUTO:
        return None
    begin = time.perf_counter()
    degree = settings.pipeline_parallel_degree
    num_stages = len(stage_modules(settings, len(model.layers)))  # pyright: ignore
    trial = Trial(model, dims, config, device)
    costs = trial.measure_costs(measured_with(num_stages // degree))
    count = assumed_microbatches(config.grpo.pipeline_microbatches, degree)
    rows = candidates(degree, num_stages if fixes_stages(settings) else None)
    tried = predict(costs, degree, count, rows)
    seconds = {
        name: trial.measure_pass(SCHEDULES[name], costs, count)
        for name in finalists(tried, config.grpo.pipeline_memory, degree)
    }
    chosen = min(seconds, key=lambda name: seconds[name])
    settings.pipeline_parallel_schedule = chosen
    if dist.get_rank() == 0:
        report = describe(tried, seconds, chosen, costs, count)
        report += f" Measuring took {time.perf_counter() - begin:.1f} s."
        logger.info(report)
        folder = Path(config.job.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = f"{report}\n\n{draw_text(*tried[chosen])}\n"
        Path(folder, "pipeline_schedule.txt").write_text(text)
        titles = {f"{name}: idle {s.bubble:.1%}": (t, s) for name, (t, s) in tried.items()}
        draw_picture(titles, Path(folder, "pipeline_schedule.png"), "seconds")
    return costs
