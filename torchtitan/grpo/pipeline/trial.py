# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs passes through a pipeline with random weights before the actual model is built."""

import gc
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.packed_attention import HostSequences
from torchtitan.grpo.pipeline.assumed_costs import assumed_costs
from torchtitan.grpo.pipeline.choice import costs_for
from torchtitan.grpo.pipeline.hop import measure_hops
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.pass_timer import Part, PassTimer
from torchtitan.grpo.pipeline.schedules import Schedule
from torchtitan.grpo.pipeline.split import split_model
from torchtitan.grpo.pipeline.table_schedule import TableSchedule
from torchtitan.grpo.pipeline.tables.costs import Costs, StageCosts
from torchtitan.grpo.upstream.parallelism import ParallelDims

_PASSES = range(3, 11)
"""Possible numbers of measured passes. Shorter passes are run more often than longer ones."""
_SECONDS = 1.0
"""Time that the measured passes of a schedule should take together, within these numbers."""


@dataclass(frozen=True)
class Trial:
    """Builds the stages that a schedule needs, and runs microbatches of random tokens.

    All methods are collective over all ranks of the run and return the same result on each rank. Each
    method frees its stages before it returns.

    Attributes:
        model: The whole model, on the meta device. It is not changed.
        dims: Parallel dimensions of the run.
        config: Configuration of the run. While a schedule is tried, it contains the schedule's name.
        device: Device on which the stages compute.
    """

    model: nn.Module
    dims: ParallelDims
    config: JobConfig
    device: torch.device

    def measure_costs(self, row: Schedule) -> Costs:
        """Measures the times of the passes of each stage and the time of a hop between ranks.

        Args:
            row: A schedule that computes I and W separately.
        """
        with self._stages(row) as stages:
            degree = self.config.parallelism.pipeline_parallel_degree
            schedule = self._schedule(row, stages, assumed_costs(self.config, len(stages)))
            self._run(schedule, 2 * degree)
            timer = PassTimer(self.device)
            for stage in stages:
                stage.timer = timer
            self._run(schedule, 2 * degree)
            measure_hops(stages, timer)
            return _costs_of_all(timer, len(stages), degree)

    def measure_pass(self, row: Schedule, measured: Costs, num_microbatches: int) -> float:
        """Returns the median time, in seconds, that the slowest rank takes for a whole pass.

        Args:
            row: The schedule.
            measured: Costs from :meth:`measure_costs`, which shape the table.
            num_microbatches: Number of microbatches of the pass.
        """
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
        """Builds this rank's stages and frees them at the end of the context."""
        settings = self.config.parallelism
        before, settings.pipeline_parallel_schedule = settings.pipeline_parallel_schedule, row.name
        is_cuda = self.device.type == "cuda"
        try:
            with torch.random.fork_rng(devices=[self.device] if is_cuda else []):
                stages, parts = split_model(self.model, self.dims, self.config, self.device)
                for part in parts:
                    part.to_empty(device=self.device)
                    with torch.no_grad():
                        part.init_weights(buffer_device=None)  # pyright: ignore
                yield stages
        finally:
            settings.pipeline_parallel_schedule = before
            del stages[:], parts[:]
            gc.collect()
            if is_cuda:
                torch.cuda.empty_cache()

    def _schedule(self, row: Schedule, stages: list[LeanStage], costs: Costs) -> TableSchedule:
        degree, per_rank = self.config.parallelism.pipeline_parallel_degree, len(stages)
        return TableSchedule(
            list(stages),
            lambda count: row.make_table(degree, count, per_rank, costs),
            costs,
            lambda output, _: output.sum(),
        )

    def _seconds_of_pass(self, schedule: TableSchedule, num_microbatches: int) -> float:
        """Runs a pass and returns the time of the slowest rank."""
        dist.barrier()
        begin = time.perf_counter()
        self._run(schedule, num_microbatches)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, time.perf_counter() - begin)
        return max(of_ranks)

    def _run(self, schedule: TableSchedule, num_microbatches: int) -> None:
        """Runs a pass of microbatches whose rows contain one sequence each."""
        config = self.config
        shape = (config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len)
        vocab_size: int = self.model.model_args.vocab_size  # pyright: ignore
        tokens = torch.randint(vocab_size, shape, device=self.device)
        whole_rows = torch.zeros(shape, dtype=torch.int64)
        named = {
            "sequence_ids": whole_rows.to(self.device),
            "host_sequences": HostSequences(whole_rows),
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


def _costs_of_all(timer: PassTimer, stages_per_rank: int, num_ranks: int) -> Costs:
    """Returns the times of all stages, averaged over the ranks that hold the same stage.

    The time of a hop is averaged over all neighboring ranks. All ranks use these averages, because
    FSDP's collectives connect the pipelines and all ranks must therefore choose the same schedule.
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
