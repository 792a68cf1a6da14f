# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how much of a pipeline's idle time a job fills, and what it costs the training passes.

    python benchmarks/pipeline_fill.py [--json] [--rounds 16]

First, all schedules are simulated for 2, 4 and 8 ranks. The table shows which share of the ranks'
time is idle before their passes, where units of `parallelism.pipeline_fill_jobs` may run, and the
idle share of the whole makespan, of which the rest follows a rank's last pass.

Then four processes run some schedules with the runtime that trains models. Their stages sleep
instead of computing, and so do the units of a job, for random times from 1 to 20 ms. Each round
runs a pass without the job and a pass with it, so that other load on the machine meets both. The
delay is the median of the rounds' ratios of both times; "late" is what the job's metrics say.

The benchmark takes about three minutes. It exits with status 1 if the job fills less than 0.6 of
the idle time of 1F1B that the simulator calls usable, or if it makes a pass more than 2 % longer.
Processes that keep the cores busy delay sleeping stages as well: the times are those of a quiet
machine only if a pass takes 1.26 s under 1F1B. With ``--json`` the last line is a JSON object.
"""

import statistics
import sys
from typing import Any

from figures import finish, make_parser, say_bounds, schedule_rows
from ranks import run_job

from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.gaps import idle_before
from torchtitan.grpo.pipeline.tables.simulate import simulate

RATIOS = ((1.0, 1.0, 1.0), (1.0, 2.0, 0.8))
DEGREES = (2, 4, 8)
MICROBATCHES_A_RANK = 4
NUM_RANKS = 4
JOB = {
    "schedules": ["1F1B", "VHalf", "ZBVZeroBubble"],
    "times": [0.03, 0.06, 0.024],
    "microbatches": 2 * NUM_RANKS,
    "unit_seconds": [0.001, 0.02],
    "seed": 0,
}
"""Times are those of F, I and W on a rank, in seconds, as with activation checkpointing."""
MUST_FILL = {"1F1B": 0.6}
MOST_DELAY = 1.02


def simulated() -> dict[str, float]:
    """Simulates all schedules, prints the table, and returns its figures."""
    figures = {}
    for times in RATIOS:
        print(
            f"\nF, I and W take {', '.join(f'{t:g}' for t in times)}, {MICROBATCHES_A_RANK} "
            "microbatches per rank: share of the time that is idle before a pass, and in all"
        )

        def cell(name: str, p: int, times: tuple[float, ...] = times) -> str:
            usable, idle = idle_shares(name, p, times)
            figures[f"{name}_p{p}_{'_'.join(f'{t:g}' for t in times)}_usable"] = usable
            return f"{usable:8.1%} {idle:6.1%}"

        print(*schedule_rows(DEGREES, cell), sep="\n")
    return figures


def idle_shares(name: str, num_ranks: int, times: tuple[float, ...]) -> tuple[float, float]:
    """Returns which share of the ranks' time is idle before their passes, and at any time."""
    row = SCHEDULES[name]
    costs = Costs.uniform(num_ranks, row.stages_per_rank, times)
    table = row.make_table(num_ranks, MICROBATCHES_A_RANK * num_ranks, costs)
    found = simulate(table, costs)
    usable = sum(sum(idle_before(table, found, rank)) for rank in range(num_ranks))
    return usable / (num_ranks * found.makespan), found.bubble


def measured(rounds: int) -> tuple[dict[str, float], list[str]]:
    """Runs sleeping stages; returns figures, and a text for each bound that is exceeded."""
    shortest, longest = JOB["unit_seconds"]
    print(
        f"\nSleeping stages, p = {NUM_RANKS}, {JOB['microbatches']} microbatches; F, I and W take "
        f"{', '.join(f'{1000 * t:g}' for t in JOB['times'])} ms, units {1000 * shortest:g} to "
        f"{1000 * longest:g} ms; {rounds} rounds"
    )
    print(
        f"{'':16}{'pass':>8} {'units':>6} {'filled':>7} {'delay':>7} {'quartiles':>14} {'late':>7}"
    )
    figures, missed = {}, []
    job = JOB | {"rounds": rounds}
    found_by_name = run_job(NUM_RANKS, "pipeline_fill_run.py", job, timeout_seconds=800)
    for name, found in found_by_name.items():
        figures |= _figures(name, found, missed)
    return figures, missed


def _figures(name: str, rounds: list[dict[str, Any]], missed: list[str]) -> dict[str, float]:
    alone, filled = ([one[way] for one in rounds] for way in ("alone", "filled"))
    total = {
        key: sum(rank[key] for one in rounds for rank in one["ranks"])
        for key in rounds[0]["ranks"][0]
    }
    late = sum(max(rank["late_seconds"] for rank in one["ranks"]) for one in rounds)
    share = total["seconds"] / total["usable_seconds"]
    ratios = [one["filled"] / one["alone"] for one in rounds]
    low, delay, high = statistics.quantiles(ratios, n=4)
    print(
        f"{name:16}{1000 * statistics.median(alone):6.0f}ms {total['units'] / len(rounds):6.1f} "
        f"{share:7.1%} {delay:7.3f} {low:6.3f} - {high:.3f} {late / sum(filled):7.2%}"
    )
    if share < MUST_FILL.get(name, 0.0):
        missed.append(f"{name}: {share:.1%} of the usable idle time is filled")
    if delay > MOST_DELAY:
        missed.append(f"{name}: passes with the job take {delay:.3f} of the time without it")
    return {f"{name}_filled": share, f"{name}_delay": delay}


def main() -> int:
    """Runs the benchmark and returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=16, help="number of rounds")
    given = parser.parse_args()
    paper = simulated()
    figures, missed = measured(given.rounds)
    holds = say_bounds(missed)
    figures = paper | figures
    return finish(given, "pipeline_fill", holds, figures)


if __name__ == "__main__":
    sys.exit(main())
