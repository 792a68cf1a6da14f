# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the pipeline schedule of a run by the measured times of its stages.

Before the model is built, its layers are built once with random weights, in two stages a rank, and
a few microbatches of random tokens are timed. The times of the stages say how long every schedule
would take, wherever it places them. A configuration that fixes the number of stages leaves those
schedules to choose from that can run so many, and these stages are timed.
"""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.pipeline.assumed_costs import assumed_costs
from torchtitan.grpo.pipeline.choice import choose, describe, predict
from torchtitan.grpo.pipeline.draw import draw_picture, draw_text
from torchtitan.grpo.pipeline.hop import measure_hops
from torchtitan.grpo.pipeline.pass_timer import Part, PassTimer
from torchtitan.grpo.pipeline.schedules import AUTO, Schedule, candidates, measured_with
from torchtitan.grpo.pipeline.split import split_model
from torchtitan.grpo.pipeline.stages import fixes_stages, stage_modules
from torchtitan.grpo.pipeline.table_schedule import TableSchedule
from torchtitan.grpo.pipeline.tables.costs import Costs, StageCosts


def resolve_schedule(
    model: nn.Module, dims: ParallelDims, config: JobConfig, device: torch.device
) -> Costs | None:
    """Replaces ``auto`` in the configuration by the fastest schedule that fits.

    Collective over all ranks of the run. Rank 0 logs the reason, and writes it with pictures to
    ``pipeline_schedule.txt`` and ``pipeline_schedule.png`` in the run's folder.

    Args:
        model: The whole model, on the meta device; it is left alone.
        dims: Parallel dimensions of the run.
        config: Configuration of the run. ``parallelism.pipeline_parallel_schedule`` is changed.
        device: Device on which the stages compute.

    Returns:
        The measured costs of all stages, two a rank unless the configuration fixes their number;
        None if the configuration names a schedule.
    """
    settings = config.parallelism
    if settings.pipeline_parallel_schedule != AUTO:
        return None
    degree = settings.pipeline_parallel_degree
    num_stages = len(stage_modules(settings, len(model.layers)))  # pyright: ignore
    trial = measured_with(num_stages // degree)
    settings.pipeline_parallel_schedule = trial.name
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        costs = _measure(trial, model, dims, config, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # What a step will have is not known yet; the order of the schedules rarely depends on it.
    num_microbatches = 4 * degree
    rows = candidates(degree, num_stages if fixes_stages(settings) else None)
    tried = predict(costs, degree, num_microbatches, rows)
    chosen = choose(tried, config.grpo.pipeline_memory, degree)
    settings.pipeline_parallel_schedule = chosen
    if dist.get_rank() == 0:
        report = describe(tried, chosen, costs, num_microbatches)
        logger.info(report)
        folder = Path(config.job.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = f"{report}\n\n{draw_text(*tried[chosen])}\n"
        Path(folder, "pipeline_schedule.txt").write_text(text)
        titles = {f"{name}: idle {s.bubble:.1%}": (t, s) for name, (t, s) in tried.items()}
        draw_picture(titles, Path(folder, "pipeline_schedule.png"), "seconds")
    return costs


def _measure(
    trial: Schedule, model: nn.Module, dims: ParallelDims, config: JobConfig, device: torch.device
) -> Costs:
    """Times a pass of random rows after one that warms up, and the way of a tensor between ranks."""
    degree = config.parallelism.pipeline_parallel_degree
    stages, parts = split_model(model, dims, config, device)
    assumed = assumed_costs(config, len(stages))
    for part in parts:
        part.to_empty(device=device)
        with torch.no_grad():
            part.init_weights(buffer_device=None)  # pyright: ignore[reportCallIssue]
    schedule = TableSchedule(
        stages,
        lambda count: trial.make_table(degree, count, len(stages), assumed),
        assumed,
        lambda output, _: output.sum(),
    )
    vocab_size: int = model.model_args.vocab_size  # pyright: ignore
    _run_random_rows(schedule, config, device, vocab_size)
    timer = PassTimer(device)
    for stage in stages:
        stage.timer = timer
    _run_random_rows(schedule, config, device, vocab_size)
    measure_hops(stages, timer)
    return _costs_of_all(timer, len(stages), degree)


def _run_random_rows(
    schedule: TableSchedule, config: JobConfig, device: torch.device, vocab_size: int
) -> None:
    """Runs twice as many microbatches as there are ranks, each with rows of one sequence."""
    count = 2 * config.parallelism.pipeline_parallel_degree
    shape = (config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len)
    tokens = torch.randint(vocab_size, shape, device=device)
    named = {
        "sequence_ids": torch.zeros_like(tokens),
        "positions": torch.arange(shape[1], device=device).expand(shape),
        "labels": tokens,
    }
    has_input = any(stage.is_first for stage in schedule.stages)
    has_output = any(stage.is_last for stage in schedule.stages)
    schedule.run(
        [(tokens,) if has_input else ()] * count,
        [named] * count,
        [torch.zeros(1)] * count if has_output else None,
    )


def _costs_of_all(timer: PassTimer, stages_per_rank: int, num_ranks: int) -> Costs:
    """Returns the times of all stages, averaged over the ranks that hold the same one.

    The hop is that of all neighbours on average. All ranks must come to the same choice, because
    FSDP's collectives connect pipelines.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (timer.medians(), timer.median_hop()))
    hops = [hop for _, hop in of_ranks if hop is not None]

    def mean(stage: int, kind: Part) -> float:
        found = [times[stage, kind] for times, _ in of_ranks if (stage, kind) in times]
        assert found or kind == "R", f"No rank has measured {kind} of stage {stage}."
        return sum(found) / len(found) if found else 0.0

    memory = 1 / stages_per_rank

    def costs(stage: int) -> StageCosts:
        forward, recompute, rest, weight_grad = (mean(stage, kind) for kind in ("F", "R", "I", "W"))
        return StageCosts(
            forward, recompute + rest, weight_grad,
            activation=memory, pending=memory, recompute=recompute,
        )  # fmt: skip

    stages = tuple(costs(stage) for stage in range(stages_per_rank * num_ranks))
    return Costs(stages, hop=sum(hops) / len(hops))
