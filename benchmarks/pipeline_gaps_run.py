# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a rank of `pipeline_gaps.py`, whose training and reference passes sleep."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pipeline_schedules_run import DIM, SleepingModule, build
from rank_job import answer_job
from torch.distributed.pipelining import PipelineStage

from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.table_schedule import GapRows, TableSchedule
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.rules import forward_only

WAYS = ("alone", "filled", "apart", "in gaps")


class Passes:
    """Runs training passes under one schedule, and reference passes on the same ranks.

    Args:
        name: Name of the schedule.
        times: Times of F, I and W on one rank.
        count: Number of microbatches of a training pass, and of reference passes.
        fitting: Number of reference passes that fit into the gaps of a training pass.
    """

    def __init__(self, name: str, times: list[float], count: int, fitting: int) -> None:
        self.training, self.count, self.fitting = build(name, times, None), count, fitting
        stages, per_rank = self.training.stages, len(self.training.stages)
        ranks = tuple(self.training.stage_index_to_group_rank.values())
        self.reference = TableSchedule(
            [self._reference_of(stage, times[0] / per_rank) for stage in stages],
            lambda number: forward_only(ranks, number),
            Costs.uniform(dist.get_world_size(), per_rank, times),
        )
        self.has_first = any(stage.is_first for stage in stages)
        self.has_last = any(stage.is_last for stage in stages)
        self.rows = [torch.randn(1, DIM, requires_grad=True) for _ in range(count)]
        self.model = None

    @staticmethod
    def _reference_of(stage: LeanStage, forward: float) -> LeanStage:
        return LeanStage.like(
            PipelineStage(
                SleepingModule(forward, 0.0), stage.stage_index, stage.num_stages, stage.device
            )
        )

    def run(self, way: str) -> float:
        """Runs one of ``WAYS``; returns the time from the first start to the last end of a rank."""
        if self.model is None:
            self._rate(self.count)
            self.model = self.training.add_gap_model(self.reference.stages)
        apart = {"alone": 0, "filled": 0, "apart": self.count, "in gaps": self.count - self.fitting}
        in_gaps = self.fitting if way in ("filled", "in gaps") else 0
        waiting = [GapRows(self.model, self._inputs(in_gaps), [{}] * in_gaps)] if in_gaps else []
        dist.barrier()
        begin = time.monotonic()
        self._rate(apart[way])
        self.training.run(
            self._inputs(self.count), [{}] * self.count,
            [torch.ones(1, DIM)] * self.count if self.has_last else None, waiting=waiting,
        )  # fmt: skip
        dist.barrier()
        seconds = time.monotonic() - begin
        assert all(rows.num_done == in_gaps for rows in waiting), (
            "Fewer reference passes fit into the gaps than simulated."
        )
        return seconds

    @torch.no_grad()
    def _rate(self, count: int) -> None:
        if count:
            self.reference.run(self._inputs(count), [{}] * count)

    def _inputs(self, count: int) -> list[tuple[torch.Tensor, ...]]:
        return [(row,) if self.has_first else () for row in self.rows[:count]]


def in_turns(passes: dict[str, Callable[[str], float]], rounds: int) -> dict[str, dict[str, list]]:
    """Returns the seconds of each schedule and way. Each round runs all of them once."""
    seconds: dict[str, dict[str, list]] = {name: {way: [] for way in WAYS} for name in passes}
    for number in range(rounds + 1):
        for name, run in passes.items():
            for way in WAYS:
                found = run(way)
                if number > 0:  # the first round builds tables and infers shapes
                    seconds[name][way].append(found)
    return seconds


def work(settings: dict[str, Any]) -> dict[str, dict[str, list]]:
    passes = {
        name: Passes(name, settings["times"], settings["microbatches"], fitting).run
        for name, fitting in settings["fitting"].items()
    }
    return in_turns(passes, settings["rounds"])


if __name__ == "__main__":
    answer_job(work)
