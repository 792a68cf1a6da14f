# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the pipeline schedule of a run from measured times.

A few microbatches of random tokens are timed with random weights, in two stages on each rank,
or in as many as the configuration fixes. These times predict the duration of every schedule.
The schedules predicted to be fastest are then run, because predictions ignore the overhead of
additional stages and of split backward passes.
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.packed_attention import HostReach
from torchtitan.grpo.pipeline.build import AnySchedule, helix_schedule, split_model
from torchtitan.grpo.pipeline.choice import (
    assumed_costs,
    assumed_part_costs,
    costs_for,
    describe,
    finalists,
    predict,
)
from torchtitan.grpo.pipeline.draw import draw_picture, draw_text
from torchtitan.grpo.pipeline.helix_limits import helix_model_problems, helix_problems
from torchtitan.grpo.pipeline.helix_schedule import HelixSchedule
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.pass_timer import PassTimer, average_costs
from torchtitan.grpo.pipeline.schedules import (
    AUTO,
    HELIX,
    SCHEDULES,
    Schedule,
    assumed_microbatches,
    candidates,
    measured_with,
)
from torchtitan.grpo.pipeline.stages import fixes_stages, stage_modules
from torchtitan.grpo.pipeline.table_schedule import TableSchedule
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.helix import helix
from torchtitan.grpo.pipeline.tables.simulate import simulate
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.upstream.parallelism import ParallelDims


def resolve_schedule(
    model: nn.Module, dims: ParallelDims, config: JobConfig, device: torch.device
) -> Costs | None:
    """Replaces ``auto`` in the configuration by the fastest schedule that fits into memory.

    Returns the schedule's measured costs, or None if the configuration names a schedule itself.
    Collective. ``model`` is the whole model on the meta device. Rank 0 writes the reasons for the choice
    to ``pipeline_schedule.txt`` and ``.png`` in the run's folder.
    """
    settings = config.parallelism
    if settings.pipeline_parallel_schedule != AUTO:
        return None
    begin = time.perf_counter()
    degree = settings.pipeline_parallel_degree
    num_stages = len(stage_modules(settings, len(model.layers)))  # pyright: ignore
    trial = Trial(model, dims, config, device)
    costs = trial.measure_costs(measured_with(num_stages // degree), 2 * degree)
    count = assumed_microbatches(degree)
    rows = candidates(degree, num_stages if fixes_stages(settings) else None)
    tried = predict(costs, degree, count, rows)
    costs_of = dict.fromkeys(tried, costs)
    if trial.may_use_parts(count):
        costs_of[HELIX] = parts = trial.measure_costs(SCHEDULES[HELIX], count)
        tried |= predict(parts, degree, count, [SCHEDULES[HELIX]])
    seconds = {
        name: trial.measure_pass(SCHEDULES[name], costs_of[name], count)
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
    return costs_of[chosen]


_PASSES = range(3, 11)
"""Least and largest number of measured passes."""
_SECONDS = 1.0
"""Time that the measured passes of a schedule should take together, within these numbers."""


@dataclass(frozen=True)
class Trial:
    """Builds the stages that a schedule needs, and runs microbatches of random tokens.

    All methods are collective over all ranks of the run, return the same result on each, and free
    the stages that they built. While a schedule is tried, the configuration contains its name.
    """

    model: nn.Module
    dims: ParallelDims
    config: JobConfig
    device: torch.device

    def measure_costs(self, row: Schedule, most_microbatches: int) -> Costs:
        with self._stages(row) as stages:
            assumed = assumed_costs(self.config, len(stages))
            if row.divides_layers:
                assumed = assumed_part_costs(self.config, self.model.model_args)
            schedule = self._schedule(row, stages, assumed)
            count = min(most_microbatches, 2 * self.config.parallelism.pipeline_parallel_degree)
            self._run(schedule, count)
            timer = PassTimer(self.device)
            timed = [schedule] if isinstance(schedule, HelixSchedule) else stages
            for one in timed:
                one.timer = timer
            self._run(schedule, count)
            measure_hops(stages, timed[0].example_of_exchanges(), timer)
            memory = 0.0 if row.divides_layers else 1 / len(stages)
            measured = average_costs(timer, range(len(assumed.stages)), memory)
        if not row.divides_layers:
            return measured
        parts = (
            replace(stage, activation=a.activation, shared=a.shared)
            for stage, a in zip(measured.stages, assumed.stages, strict=True)
        )
        return replace(measured, stages=tuple(parts))

    def may_use_parts(self, num_microbatches: int) -> bool:
        """Returns whether Helix, whose stages are parts of layers, can run within the allowed memory."""
        config, args = self.config, self.model.model_args
        problems = itertools.chain(helix_problems(config), helix_model_problems(args, ""))
        degree = config.parallelism.pipeline_parallel_degree
        if fixes_stages(config.parallelism) or any(problems) or args.n_layers + 1 < degree:  # pyright: ignore
            return False
        costs = assumed_part_costs(config, args)
        peak = simulate(helix(degree, num_microbatches, costs), costs).peak
        return peak <= config.grpo.pipeline_memory * degree

    def measure_pass(self, row: Schedule, measured: Costs, num_microbatches: int) -> float:
        """Returns the median time in seconds of a whole pass on the slowest rank."""
        with self._stages(row) as stages:
            costs = costs_for(row, measured, self.config.parallelism.pipeline_parallel_degree)
            schedule = self._schedule(row, stages, costs)
            # The first pass infers shapes, opens connections and compiles.
            self._run(schedule, num_microbatches)
            warm = self._seconds_of_pass(schedule, num_microbatches)
            count = min(max(math.ceil(_SECONDS / warm), _PASSES.start), _PASSES.stop - 1)
            return statistics.median(
                self._seconds_of_pass(schedule, num_microbatches) for _ in range(count)
            )

    @contextmanager
    def _stages(self, row: Schedule) -> Iterator[list[LeanStage]]:
        settings = self.config.parallelism
        before, settings.pipeline_parallel_schedule = settings.pipeline_parallel_schedule, row.name
        is_cuda = self.device.type == "cuda"
        try:
            with torch.random.fork_rng(devices=[self.device] if is_cuda else []):
                stages, parts = split_model(self.model, self.dims, self.config, self.device)
                for part in parts:
                    part.to_empty(device=self.device)
                    with torch.no_grad():
                        part.init_weights()  # pyright: ignore
                yield stages
        finally:
            settings.pipeline_parallel_schedule = before
            del stages[:], parts[:]
            gc.collect()
            if is_cuda:
                torch.cuda.empty_cache()

    def _schedule(self, row: Schedule, stages: list[LeanStage], costs: Costs) -> AnySchedule:
        if row.divides_layers:
            return helix_schedule(self.config, stages, lambda output, _: output.sum(), costs)
        degree = self.config.parallelism.pipeline_parallel_degree
        return TableSchedule(
            list(stages),
            lambda count: row.make_table(degree, count, costs),
            costs,
            lambda output, _: output.sum(),
        )

    def _seconds_of_pass(self, schedule: AnySchedule, num_microbatches: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        self._run(schedule, num_microbatches)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, time.perf_counter() - begin)
        return max(of_ranks)

    def _run(self, schedule: AnySchedule, num_microbatches: int) -> None:
        config = self.config
        shape = (config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len)
        vocab_size: int = self.model.model_args.vocab_size  # pyright: ignore
        tokens = torch.randint(vocab_size, shape, device=self.device)
        whole_rows = torch.full(shape, shape[1], dtype=torch.int64)
        named = {
            "reach": whole_rows.to(self.device),
            "host_reach": HostReach(whole_rows),
            "positions": torch.arange(shape[1], device=self.device).expand(shape),
            "labels": tokens,
        }
        has_input = any(stage.is_first for stage in schedule.stages)
        has_output = any(stage.is_last for stage in schedule.stages)
        schedule.run(
            [(tokens,) if has_input else ()] * num_microbatches,
            [named] * num_microbatches,
            [torch.zeros(1)] * num_microbatches if has_output else None,
        )
        for stage in schedule.stages:
            stage.submod.zero_grad()


_NUM_EXCHANGES = 64


def measure_hops(stages: list[LeanStage], tensor: torch.Tensor, timer: PassTimer) -> None:
    """Times how long a tensor like those that stages exchange takes to a neighboring rank and back.

    Collective. The lower of two neighbors measures. No rank exchanges with both its neighbors at once.
    """
    rank, num_ranks, group = stages[0].group_rank, stages[0].group_size, stages[0].group
    for first in (0, 1):  # the ranks 0 and 1, 2 and 3, ..., and then 1 and 2, 3 and 4, ...
        begins = (rank - first) % 2 == 0
        neighbor = rank + 1 if begins else rank - 1
        if not 0 <= neighbor < num_ranks:
            continue
        for _ in range(_NUM_EXCHANGES):  # the first one opens the connection, and is no median
            if begins:
                with timer.measure(rank, "H"):
                    dist.send(tensor, group=group, group_dst=neighbor)
                    dist.recv(tensor, group=group, group_src=neighbor)
            else:
                dist.recv(tensor, group=group, group_src=neighbor)
                dist.send(tensor, group=group, group_dst=neighbor)
