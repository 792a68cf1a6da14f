# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a rank of `pipeline_compute.py`, which trains a real model under every schedule."""

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_job import answer_job

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "programs"))

from build_model import build_stages

from torchtitan.grpo.pipeline.build import build_schedule
from torchtitan.grpo.pipeline.helix_schedule import HelixSchedule
from torchtitan.grpo.pipeline.pass_timer import PassTimer
from torchtitan.grpo.pipeline.table_schedule import TableSchedule

FOLDER = "pipeline"


class ProcessorTimer(PassTimer):
    """Measures the processor time of this thread, which does not depend on other load."""

    def _mark(self) -> float:
        return time.thread_time()


def build(job: dict[str, Any], case: dict[str, Any]) -> tuple[TableSchedule | HelixSchedule, str]:
    """Returns the schedule of a case over the stages of a real model, and its name."""
    built, stages = build_stages(
        job["model"], job["seq_len"], local_batch_size=1, pp=job["ranks"],
        folder=str(Path(job["folder"], FOLDER)), edge_layers=0, **case,
    )  # fmt: skip
    schedule = build_schedule(
        built.config, stages, lambda output, _: output[..., 0].sum(), built.measured
    )
    assert isinstance(schedule, TableSchedule), "these cases have stages of whole layers"
    return schedule, built.config.parallelism.pipeline_parallel_schedule


def run_pass(schedule: TableSchedule | HelixSchedule, job: dict[str, Any]) -> float:
    """Runs one pass; returns the time from the start of the first rank to the end of the last."""
    microbatches, shape = job["microbatches"], (1, job["seq_len"])
    rows = [torch.randint(1, 500, shape) for _ in range(microbatches)]
    has_first = any(stage.is_first for stage in schedule.stages)
    has_last = any(stage.is_last for stage in schedule.stages)
    named = [
        {
            "reach": torch.full(shape, shape[1]),
            "positions": torch.arange(shape[1]).expand(shape),
            "labels": row,
        }
        for row in rows
    ]
    dist.barrier()
    begin = time.perf_counter()
    schedule.run(
        [(row,) if has_first else () for row in rows], named,
        [torch.zeros(1)] * microbatches if has_last else None,
    )  # fmt: skip
    dist.barrier()
    seconds = time.perf_counter() - begin
    for stage in schedule.stages:
        stage.submod.zero_grad()
    return seconds


def passes(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the seconds of each round and the name of the schedule, both by case."""
    built = {label: build(job, case) for label, case in job["cases"].items()}
    for schedule, _ in built.values():
        run_pass(schedule, job)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(job["rounds"]):
        for label, (schedule, _) in built.items():
            found[label].append(run_pass(schedule, job))
    return {"seconds": found, "names": {label: name for label, (_, name) in built.items()}}


def processor_times(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the processor time of each stage and kind of pass, by case."""
    built = {label: build(job, case)[0] for label, case in job["cases"].items()}
    timers = {label: ProcessorTimer(torch.device("cpu")) for label in built}
    for schedule in built.values():
        run_pass(schedule, job)
    for _ in range(job["rounds"]):
        for label, schedule in built.items():
            for stage in schedule.stages:
                stage.timer = timers[label]
            run_pass(schedule, job)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {label: timer.medians() for label, timer in timers.items()})
    return {
        label: [[*key, t] for of_rank in of_ranks for key, t in of_rank[label].items()]
        for label in built
    }


def work(job: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"passes": passes, "processor": processor_times}[job["what"]](job)


if __name__ == "__main__":
    answer_job(work, opens_group=False)
