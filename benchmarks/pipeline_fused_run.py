# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a rank of `pipeline_fused.py`, whose stages sleep instead of computing."""

from typing import Any

from pipeline_schedules_run import build, seconds_of_pass
from rank_job import answer_job

Rounds = dict[str, list[float]]


def rounds_of(name: str, times: list[float], microbatches: int, rounds: int) -> Rounds:
    """Returns the seconds of a pass that trains both models, and of two that train one each."""
    first, second = build(name, times, None), build(name, times, None, is_second=True)
    found: Rounds = {"one": [], "two": []}
    for _ in range(1 + rounds):
        apart = [seconds_of_pass(schedule, microbatches) for schedule in (first, second)]
        found["two"].append(sum(apart))
        found["one"].append(seconds_of_pass(first, microbatches, second))
    return {way: seconds[1:] for way, seconds in found.items()}  # the first round infers shapes


def work(settings: dict[str, Any]) -> dict[str, Rounds]:
    return {
        f"{name} {count}": rounds_of(name, settings["times"], count, settings["rounds"])
        for name in settings["schedules"]
        for count in settings["microbatches"]
    }


if __name__ == "__main__":
    answer_job(work)
