# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains two models, as a policy and a critic, in one pass of a pipeline and in two.

    python benchmarks/pipeline_fused.py [--json] [--rounds N]

The models are equal. In one pass the second one runs where the first leaves ranks idle
(https://arxiv.org/abs/2409.13221). Each of four ranks sleeps for its passes, so that the time shows
the schedule alone. A line of the table has the number of microbatches, the simulated time of one pass
relative to two, the measured one as the median of the rounds with its range, the measured time
relative to the simulated one, and the largest memory of activations relative to two passes,
simulated. The exit status is 1 if 1F1B takes more than 0.9 of two passes, or a pass more than 1.05 of
its simulation. With ``--json`` the last line is an object. It takes about five minutes.
"""

import statistics
import sys
from typing import Any

from figures import finish, make_parser, say_bounds
from ranks import run_job

from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.fused import simulate_fused
from torchtitan.grpo.pipeline.tables.simulate import simulate

NUM_RANKS = 4
JOB = {
    "schedules": ["1F1B", "Interleaved1F1B", "ZBH1", "ZBVZeroBubble"],
    "times": [0.06, 0.12, 0.048],
    "microbatches": [NUM_RANKS, 2 * NUM_RANKS],
}
"""Times are those of F, I and W on a rank, in seconds, as with activation checkpointing."""
LONGEST = {"1F1B": 0.9}
OVER_SIMULATION = 1.05


def simulated(name: str, microbatches: int) -> dict[str, float]:
    """Returns seconds and peaks of one pass, and of two."""
    row = SCHEDULES[name]
    costs = Costs.uniform(NUM_RANKS, row.stages_per_rank, JOB["times"])
    table = row.make_table(NUM_RANKS, microbatches, costs)
    alone = simulate(table, costs)
    _, one = simulate_fused(table, costs, turns=row.turns_second)
    return {"one": one.makespan, "two": 2 * alone.makespan, "memory": one.peak / alone.peak}


def report(rounds: int) -> tuple[dict[str, Any], list[str]]:
    """Prints the table; returns its figures, and a text for each bound that is exceeded."""
    print(
        f"{'':16}{'count':>6} {'simulated':>10} {'measured':>9} {'range':>14} {'over':>6} {'memory':>7}"
    )
    figures, missed = {}, []
    job = JOB | {"rounds": rounds}
    measured = run_job(NUM_RANKS, "pipeline_fused_run.py", job, timeout_seconds=800)
    for key, seconds in measured.items():
        name, count = key.split()
        plan = simulated(name, int(count))
        ratios = sorted(one / two for one, two in zip(seconds["one"], seconds["two"], strict=True))
        ratio, over = statistics.median(ratios), statistics.median(seconds["one"]) / plan["one"]
        print(
            f"{name:16}{count:>6} {plan['one'] / plan['two']:10.3f} {ratio:9.3f}"
            f" {ratios[0]:6.3f} - {ratios[-1]:.3f} {over:6.3f} {plan['memory']:7.2f}"
        )
        figures[key] = {"ratio": ratio, "over": over} | plan
        if ratio > LONGEST.get(name, 1.0):
            missed.append(f"{key}: one pass takes {ratio:.3f} of two")
        if over > OVER_SIMULATION:
            missed.append(f"{key}: a pass takes {over:.3f} of its simulation")
    return figures, missed


def main() -> int:
    """Runs the benchmark and returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    given = parser.parse_args()
    figures, missed = report(given.rounds)
    return finish(given, "pipeline_fused", say_bounds(missed), figures)


if __name__ == "__main__":
    sys.exit(main())
