# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a rank of `pipeline_fill.py`, whose stages and units sleep."""

import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_schedules_run import build, seconds_of_pass
from rank_job import answer_job

from torchtitan.grpo.pipeline.fill_jobs import FillContext, UserJob
from torchtitan.grpo.pipeline.table_schedule import TableSchedule

WARM_UP = 2
"""Passes with the job before those that count: the second one measures the stages."""


def units_of(shortest: float, longest: float, seed: int) -> Any:
    """Returns a job whose units take random times, in seconds, evenly distributed."""

    def units(context: FillContext) -> Iterator[None]:
        times = random.Random(seed + context.rank)
        while True:
            time.sleep(times.uniform(shortest, longest))
            yield

    return units


def with_job(name: str, settings: dict[str, Any]) -> TableSchedule:
    schedule = build(name, settings["times"], None)
    rank, number = dist.get_rank(), dist.get_world_size()
    context = FillContext(torch.device("cpu"), rank, number, rank, number, Path())
    shortest, longest = settings["unit_seconds"]
    job = UserJob("units", units_of(shortest, longest, settings["seed"]), context)
    schedule.fill([job])
    return schedule


def rounds_of(name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns, for each round, the seconds of a pass without and with the job, and what was filled.

    Rounds begin with one and the other in turn.
    """
    schedule, count = with_job(name, settings), settings["microbatches"]
    filler = schedule.filler
    assert filler is not None

    def run(*, fills: bool) -> float:
        schedule.filler = filler if fills else None
        return seconds_of_pass(schedule, count)

    for _ in range(WARM_UP):
        run(fills=True)
    filler.take_figures()
    rounds = []
    for number in range(settings["rounds"]):
        ways = (True, False) if number % 2 else (False, True)
        seconds = {fills: run(fills=fills) for fills in ways}
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, asdict(filler.take_figures()))
        rounds.append({"alone": seconds[False], "filled": seconds[True], "ranks": of_ranks})
    filler.close()
    return rounds


def work(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: rounds_of(name, settings) for name in settings["schedules"]}


if __name__ == "__main__":
    answer_job(work)
