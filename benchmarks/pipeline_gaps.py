# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how much of a reference model's forward passes fits into the gaps of training passes.

    python benchmarks/pipeline_gaps.py [--json] [--rounds 5]

First, each schedule is simulated for 2, 4 and 8 ranks. The table shows how many microbatches pass
through the reference in the idle time of a training pass (`grpo.pipeline_fill_gaps`), and by how
much that shortens the total time of the training pass and of the reference passes of as many
microbatches.

Then 2 and 4 processes run some schedules with the runtime that trains models. Their stages sleep
instead of computing, so that processes do not compete for cores. A round runs a training pass
alone, a training pass after separate reference passes, and a training pass with reference passes in
its gaps. The medians over the rounds are compared with the simulator.

The benchmark takes about three minutes. It exits with status 1 if filling the gaps makes a training
pass more than 2 % slower, or if the hidden share differs from the simulator's by more than 0.1. With
``--json`` the last line is a JSON object.
"""

import statistics
import sys
from dataclasses import replace
from typing import Any

from figures import finish, make_parser, say_bounds, schedule_rows
from ranks import run_job

from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.tables.actions import Action, Costs, Table
from torchtitan.grpo.pipeline.tables.gaps import fill_gaps
from torchtitan.grpo.pipeline.tables.simulate import simulate

RATIOS = ((1.0, 1.0, 1.0), (1.0, 2.0, 0.8))
DEGREES = (2, 4, 8)
MICROBATCHES_A_RANK = 4
SLEEPING = {2: ("1F1B", "GPipe"), 4: ("1F1B", "VHalf")}
TIMES = [0.03, 0.06, 0.024]
"""Times of F, I and W on a rank in seconds, as with activation checkpointing."""
MOST_DELAY = 1.02
MOST_DEVIATION = 0.1


def on_paper(
    name: str, num_ranks: int, times: tuple[float, ...]
) -> tuple[int, float, float, float]:
    """Simulates a schedule.

    Returns:
        The number of microbatches whose reference passes fit into the gaps of a training pass, and
        three times: of a training pass alone, of a training pass after all reference passes, and of
        a training pass with reference passes in its gaps, after those that do not fit into them.
    """
    row, count = SCHEDULES[name], MICROBATCHES_A_RANK * num_ranks
    costs = Costs.uniform(num_ranks, row.stages_per_rank, times)
    table = row.make_table(num_ranks, count, costs)
    filled = fill_gaps(table, costs, count)
    fitting = filled.num_gap_microbatches
    ways = (table, _after_reference(table, count), _after_reference(filled, count - fitting))
    alone, apart, in_gaps = (simulate(way, costs).makespan for way in ways)
    return fitting, alone, apart, in_gaps


def _after_reference(table: Table, count: int) -> Table:
    """Returns a table that begins with the reference passes of ``count`` further microbatches."""
    first = table.num_gap_microbatches
    actions = tuple(
        tuple(
            Action(stage, "G", microbatch)
            for stage, holder in enumerate(table.ranks)
            if holder == rank
            for microbatch in range(first, first + count)
        )
        + of_rank
        for rank, of_rank in enumerate(table.actions)
    )
    return replace(table, actions=actions, num_gap_microbatches=first + count)


def simulated() -> dict[str, float]:
    """Simulates all schedules, prints the table, and returns its figures."""
    figures = {}
    for times in RATIOS:
        print(
            f"\nF, I and W take {', '.join(f'{t:g}' for t in times)}, {MICROBATCHES_A_RANK} "
            "microbatches per rank: share of the reference passes that fits into gaps, and time "
            "relative to separate reference passes"
        )

        def cell(name: str, p: int, times: tuple[float, ...] = times) -> str:
            fitting, _, apart, in_gaps = on_paper(name, p, times)
            share = fitting / (MICROBATCHES_A_RANK * p)
            key = f"{name}_p{p}_{'_'.join(f'{t:g}' for t in times)}"
            figures[f"{key}_fits"], figures[f"{key}_time"] = share, in_gaps / apart
            return f"{share:8.0%} {in_gaps / apart:6.3f}"

        print(*schedule_rows(DEGREES, cell), sep="\n")
    return figures


def measured(rounds: int) -> tuple[dict[str, float], list[str]]:
    """Runs sleeping stages; returns figures, and a text for each bound that is exceeded."""
    print(f"\nSleeping stages; F, I and W take {', '.join(f'{1000 * t:g}' for t in TIMES)} ms")
    print(f"{'':22}{'pass':>8} {'delay':>7} {'hidden':>8} {'simulated':>10}   spread of {rounds}")
    figures, missed = {}, []
    for num_ranks, names in SLEEPING.items():
        expected = {name: on_paper(name, num_ranks, tuple(TIMES)) for name in names}
        job: dict[str, Any] = {
            "times": TIMES,
            "microbatches": MICROBATCHES_A_RANK * num_ranks,
            "fitting": {name: expected[name][0] for name in names},
            "rounds": rounds,
        }
        measured_by_name = run_job(num_ranks, "pipeline_gaps_run.py", job, timeout_seconds=600)
        for name, seconds in measured_by_name.items():
            alone, filled, apart, in_gaps = (
                statistics.median(seconds[way]) for way in ("alone", "filled", "apart", "in gaps")
            )
            _, paper_alone, paper_apart, paper_in_gaps = expected[name]
            hidden = (apart - in_gaps) / (apart - alone)
            wanted = (paper_apart - paper_in_gaps) / (paper_apart - paper_alone)
            spread = f"{1000 * min(seconds['in gaps']):.0f} to {1000 * max(seconds['in gaps']):.0f}"
            print(
                f"{f'{name}, p = {num_ranks}':22}{1000 * alone:6.0f}ms {filled / alone:7.3f} {hidden:8.1%} "
                f"{wanted:10.1%}   {spread}"
            )
            key = f"{name}_p{num_ranks}"
            figures |= {f"{key}_delay": filled / alone, f"{key}_hidden": hidden}
            figures[f"{key}_simulated_hidden"] = wanted
            if filled > MOST_DELAY * alone:
                missed.append(
                    f"{name}, p = {num_ranks}: filling the gaps makes a training pass take "
                    f"{filled / alone:.3f} of its time"
                )
            if abs(hidden - wanted) > MOST_DEVIATION:
                missed.append(
                    f"{name}, p = {num_ranks}: {hidden:.1%} is hidden, simulated {wanted:.1%}"
                )
    return figures, missed


def main() -> int:
    """Runs the benchmark and returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds with sleeping stages"
    )
    given = parser.parse_args()
    paper = simulated()
    figures, missed = measured(given.rounds)
    holds = say_bounds(missed)
    figures = paper | figures
    return finish(given, "pipeline_gaps", holds, figures)


if __name__ == "__main__":
    sys.exit(main())
