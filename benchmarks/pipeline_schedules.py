# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares simulated pipeline schedules with each other and with the runtime.

    python benchmarks/pipeline_schedules.py [--json] [--quick] [--pictures FOLDER]

First, all schedules are simulated for 2, 4, 8 and 16 ranks, four microbatches per rank, and three
ratios of the times of F, I and W. The layers of a model take the same time however they are divided
into stages. The columns are the idle share of a rank's span, from its first start to its last end,
for the rank with the largest share; the idle share of the whole makespan; and the peak of
activations in microbatches.

Then the runtime that trains models runs every schedule on four processes with stages that sleep
instead of computing, so that processes do not compete for cores, and the time of a pass is
compared with the simulator's. Some schedules are also run with activation checkpointing, without
and with early recomputation (`grpo.recompute_early_blocks`). Rounds are interleaved, and medians
are shown with their spread.

Finally, a real model is trained on two ranks under every schedule and ``auto``, and the processor
times of its passes are compared (`pipeline_compute.py`). This needs a machine without other work.

The benchmark exits with status 1 if a bound is exceeded. With ``--json`` the last line is a JSON
object. ``--quick`` runs fewer ranks and rounds. ``--pictures`` draws the schedules that
docs/schedules.md shows.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from figures import finish, make_parser, say_bounds
from pipeline_compute import compare_passes, compare_processor_times
from ranks import run_job

from torchtitan.grpo.commands.schedule import try_all
from torchtitan.grpo.pipeline.draw import draw_picture

RATIOS = ((1.0, 1.0, 1.0), (3.0, 4.0, 2.0), (1.0, 2.0, 0.5))
DEGREES = (2, 4, 8, 16)
SLEEPING: dict[str, Any] = {"ranks": 4, "microbatches": 8, "times": [0.04, 0.04, 0.04]}
CHECKPOINTED = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "1F1B")
"""Schedules that are also run with activation checkpointing. The first one is the baseline."""
BOUNDS = {
    # The largest idle share of a span, by schedule, number of ranks, and index in RATIOS.
    ("VZB", 8, 0): 0.01,
    ("VHalf", 8, 0): 0.085,
    ("VHalf", 8, 1): 0.125,
    ("VZB", 8, 1): 0.0465,
}
PEAKS = {("VHalf", 8): 5.0, ("VMin", 8): 4.0, ("1F1B", 8): 8.0, ("ZBH1", 8): 8.0, ("VZB", 8): 8.0}
MOST_DEVIATION = 0.05
"""Bound of the relative difference of a pass with sleeping stages from the simulator."""
CLEAR_ORDER = 1.03
"""Schedules whose simulated times differ by this factor must be measured in the same order."""


def on_paper(degrees: tuple[int, ...]) -> tuple[dict[str, float], list[str]]:
    """Simulates all schedules and prints the table.

    Returns:
        Figures, and a text for each bound that is exceeded.
    """
    figures: dict[str, float] = {}
    missed = []
    for number, times in enumerate(RATIOS):
        print(
            f"\nF, I and W take {', '.join(f'{t:g}' for t in times)}: idle share of the span, idle "
            "share of the makespan, and peak of activations"
        )
        print(f"{'':22}" + "".join(f"{f'p = {p}':>22}" for p in degrees))
        tried = {p: try_all(p, 4 * p, times) for p in degrees}
        for name in tried[degrees[0]]:
            cells = []
            for p in degrees:
                found = tried[p][name][1]
                key = f"{name}_p{p}_{'_'.join(f'{t:g}' for t in times)}"
                if p == 8:
                    figures[f"{key}_span_bubble"] = found.span_bubble
                    figures[f"{key}_bubble"] = found.bubble
                    figures[f"{key}_peak"] = found.peak
                cells.append(
                    f"{found.span_bubble:8.1%} {found.bubble:6.1%} {found.peak:5.3g}".rjust(22)
                )
                most = BOUNDS.get((name, p, number), math.inf)
                if found.span_bubble > most:
                    missed.append(f"{name}, p = {p}, {times}: {found.span_bubble:.2%} > {most:.2%}")
                if PEAKS.get((name, p), math.inf) < found.peak:
                    missed.append(f"{name}, p = {p}: peak {found.peak} > {PEAKS[name, p]}")
                wait = formula(name, p, times)
                if wait is not None:
                    off = abs(found.span_bubble - wait / (wait + 4 * p * sum(times)))
                    if off > 1e-9:
                        missed.append(
                            f"{name}, p = {p}, {times}: differs from its formula by {off:.1e}"
                        )
            print(f"{name:22}" + "".join(cells))
    return figures, missed


def formula(name: str, p: int, times: tuple[float, ...]) -> float | None:
    """Returns the idle time of the rank with the most idle time, or None if no formula is known."""
    forward, back, weight = times
    per_rank = {
        "1F1B": forward + back + weight,
        "GPipe": forward + back + weight,
        "ZBH1": forward + back - weight,
        "ZBH2": forward + back - 2 * weight,
    }
    return (p - 1) * per_rank[name] if name in per_rank else None


def sleeping(rounds: int) -> tuple[dict[str, float], list[str]]:
    """Runs sleeping stages and prints their times beside the simulator's.

    Returns:
        Figures, and a text for each bound that is exceeded.
    """
    tried = try_all(SLEEPING["ranks"], SLEEPING["microbatches"], tuple(SLEEPING["times"]))
    measured = measure({name: (name, None) for name in tried}, rounds)
    print(f"\n{_title()}")
    print(f"{'':22} {'simulated':>10} {'measured':>10} {'ratio':>6}   spread of {rounds}")
    figures, missed = {}, []
    medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
    for fast, slow in itertools.permutations(medians, 2):
        is_clear = tried[slow][1].makespan > CLEAR_ORDER * tried[fast][1].makespan
        if is_clear and medians[slow] <= medians[fast]:
            missed.append(f"{fast} must be measured to be faster than {slow}, but it is not")
    for name, seconds in measured.items():
        expected, found = tried[name][1].makespan, medians[name]
        ratio = found / expected
        print(
            f"{name:22} {1000 * expected:8.0f}ms {1000 * found:8.0f}ms {ratio:6.3f}   {_spread(seconds)}"
        )
        figures[f"{name}_sleeping_ratio"] = ratio
        if abs(ratio - 1) > MOST_DEVIATION:
            missed.append(f"{name} with sleeping stages takes {ratio:.3f} of the simulated time")
    return figures, missed


def checkpointed(rounds: int) -> tuple[dict[str, float], list[str]]:
    """Runs sleeping stages with checkpointing, without and with early recomputation."""
    cases = {
        f"{name}{', early' if early else ''}": (name, early)
        for name in CHECKPOINTED
        for early in (0, -1)
    }
    measured = measure(cases, rounds)
    print(f"\n{_title()}, with activation checkpointing: F is repeated before I")
    print(f"{'':32} {'measured':>10} {'ratio':>6}   spread of {rounds}")
    baseline = statistics.median(measured[CHECKPOINTED[0]])
    figures, missed = {}, []
    for label, seconds in measured.items():
        found = statistics.median(seconds)
        print(f"{label:32} {1000 * found:8.0f}ms {found / baseline:6.3f}   {_spread(seconds)}")
        figures[f"{label}_checkpointed_ratio"] = found / baseline
    for name in CHECKPOINTED:
        early, late = (statistics.median(measured[n]) for n in (f"{name}, early", name))
        if early > late:
            missed.append(f"{name} must be faster with early recomputation, but it is not")
    return figures, missed


def measure(schedules: Mapping[str, tuple[str, int | None]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round of each schedule; see `pipeline_schedules_run.py`."""
    job = SLEEPING | {"schedules": dict(schedules), "rounds": rounds}
    return run_job(SLEEPING["ranks"], "pipeline_schedules_run.py", job, timeout_seconds=600)


def _title() -> str:
    times = ", ".join(f"{1000 * t:g}" for t in SLEEPING["times"])
    return (
        f"Sleeping stages, {SLEEPING['ranks']} ranks, {SLEEPING['microbatches']} microbatches; F, I and "
        f"W take {times} ms on a rank"
    )


def _spread(seconds: list[float]) -> str:
    return f"{1000 * min(seconds):.0f} to {1000 * max(seconds):.0f}"


def draw(folder: Path) -> None:
    """Draws the pictures of docs/schedules.md."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, times in (("equal", RATIOS[0]), ("checkpointed", (1.0, 2.0, 0.8))):
        tried = try_all(4, 8, times)
        titles = {
            f"{name}: idle {s.bubble:.1%}, peak {s.peak:g} microbatches": (t, s)
            for name, (t, s) in tried.items()
        }
        print(draw_picture(titles, folder / f"schedules_{file}.png"))


def main() -> int:
    """Runs the benchmark and returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer ranks and rounds")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw instead of measuring")
    given = parser.parse_args()
    if given.pictures is not None:
        draw(given.pictures)
        return 0
    paper, missed = on_paper((2, 8) if given.quick else DEGREES)
    figures, rounds = {}, 2 if given.quick else 5
    for part in (sleeping, checkpointed, compare_passes, compare_processor_times):
        found, more = part(rounds)
        figures |= found
        missed += more
    holds = say_bounds(missed)
    return finish(given, "pipeline_schedules", holds, paper | figures)


if __name__ == "__main__":
    sys.exit(main())
