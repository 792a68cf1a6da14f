# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a rank of `pipeline_schedules.py`, whose stages sleep instead of computing."""

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from rank_job import answer_job
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage

from torchtitan.grpo.models.weight_grads import WeightGradients, defer_linears
from torchtitan.grpo.pipeline.lean_stage import DeferredStage, EarlyRecompute
from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.table_schedule import TableSchedule, second_offset
from torchtitan.grpo.pipeline.tables.actions import Costs, Table
from torchtitan.grpo.pipeline.tables.fused import opposite

DIM = 4


class Sleep(torch.autograd.Function):
    """Sleeps in the forward pass and in the backward pass; not while ``is_awake``."""

    is_awake = False

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, forward: float, backward: float) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.seconds = backward
        time.sleep(0.0 if Sleep.is_awake else forward)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(0.0 if Sleep.is_awake else ctx.seconds)
        return grad, None, None


class SleepingModule(nn.Module):
    """Sleeps, and applies one linear layer, which has a weight gradient that can be deferred."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.times = forward, backward

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # Recomputation stops at the last saved tensor. The linear layer saves one, so it comes
        # last.
        return self.linear(Sleep.apply(hidden, *self.times))


class Checkpointed(nn.Module):
    """A sleeping module with activation checkpointing, which sleeps again during recomputation."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = checkpoint_wrapper(module)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module(hidden)


class SleepingStage(DeferredStage):
    """A stage that sleeps when a weight gradient is added."""

    weight_seconds = 0.0

    def _add_gradient(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        time.sleep(self.weight_seconds)
        super()._add_gradient(weight, gradient)


def build(
    name: str, times: list[float], early: int | None, *, is_second: bool = False
) -> TableSchedule:
    """Returns a schedule over sleeping stages of this rank.

    Args:
        name: Name of the schedule.
        times: Times of F, I and W on one rank.
        early: Number of blocks that are recomputed early. ``None`` leaves out checkpointing.
        is_second: Whether another schedule trains the stages beside its own.
    """
    row, degree = SCHEDULES[name], dist.get_world_size()
    per_rank = row.stages_per_rank
    costs = Costs.uniform(degree, per_rank, times)
    turns = is_second and row.turns_second
    make = partial(_make_table, name, costs, turns)
    ranks = make(1).ranks
    offset = second_offset(len(ranks)) if is_second else 0
    store = WeightGradients()
    stages = []
    for index, rank in enumerate(ranks):
        if rank == dist.get_rank():
            module = SleepingModule(times[0] / per_rank, times[1] / per_rank)
            defer_linears(module, store)
            stage = PipelineStage(module, index, len(ranks), torch.device("cpu"))
            if early is not None:
                stage.submod = Checkpointed(module)
            stages.append(SleepingStage(stage, store, offset))
            if early:
                stages[-1].early = EarlyRecompute(stage.submod, early)
            stages[-1].weight_seconds = times[2] / per_rank
    return TableSchedule(stages, make, costs, lambda output, target: (output * target).sum())


def _make_table(name: str, costs: Costs, turns: bool, microbatches: int) -> Table:
    table = SCHEDULES[name].make_table(dist.get_world_size(), microbatches, costs)
    return opposite(table) if turns else table


def seconds_of_pass(
    schedule: TableSchedule, microbatches: int, beside: TableSchedule | None = None
) -> float:
    """Runs one pass; returns the time from the start of the first rank to the end of the last."""
    stages = [*schedule.stages, *(() if beside is None else beside.stages)]
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    rows = [torch.randn(1, DIM, requires_grad=True) for _ in range(microbatches)]
    dist.barrier()
    begin = time.monotonic()
    schedule.run(
        [(row,) if has_first else () for row in rows], [{}] * microbatches,
        [torch.ones(1, DIM)] * microbatches if has_last else None, beside=beside,
    )  # fmt: skip
    dist.barrier()
    return time.monotonic() - begin


def work(settings: dict[str, Any]) -> dict[str, list[float]]:
    schedules = {
        label: build(name, settings["times"], early)
        for label, (name, early) in settings["schedules"].items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in schedules}
    for schedule in schedules.values():
        seconds_of_pass(schedule, settings["microbatches"])  # builds tables and infers shapes
    for _ in range(settings["rounds"]):
        for name, schedule in schedules.items():
            seconds[name].append(seconds_of_pass(schedule, settings["microbatches"]))
    return seconds


if __name__ == "__main__":
    answer_job(work)
