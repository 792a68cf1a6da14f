# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares pipeline schedules with real computation; a part of `pipeline_schedules.py`.

A Qwen3 model of eight layers with random weights is trained on two ranks, under every schedule and
``auto``, with and without full activation checkpointing. Rounds are interleaved, and medians are
shown. The embedding and the output layer are small compared to a layer, so the layers are divided
evenly among the stages.

Processor times are measured for each stage and each kind of pass. They do not include the time for
which a rank waits or has no core. The benchmark replays them through the dependencies of a
schedule, which gives the time that a pass would take if every rank had a core of its own.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from random_models import make_model
from ranks import run_job

from torchtitan.grpo.pipeline.schedules import AUTO, LAYER_SCHEDULES, SCHEDULES
from torchtitan.grpo.pipeline.tables.actions import Costs, StageCosts
from torchtitan.grpo.pipeline.tables.simulate import simulate

RANKS = 2
SEQ_LEN, REPLAYED_SEQ_LEN = 128, 512
"""Number of tokens of a row: for whole passes, and for passes of single stages, which are timed one
by one."""
COUNTS = (2, 4, 8, 16)
"""Numbers of microbatches of a pass."""
REPLAYED = 4
"""Number of microbatches of a pass that is replayed."""
AUTO_MOST = 1.05
"""Bound of the time of ``auto``, relative to the best schedule."""
SPLIT_MOST = {"none": 1.05, "full": 1.05, "none, compiled": 1.10, "full, compiled": 1.10}
"""Bounds of the processor time of I and W, relative to that of a whole backward pass."""
REPLAY_MOST = {"ZBVZeroBubble": 0.98, "ZBVZeroBubble, early": 0.95}
"""Bounds of the replayed time with full checkpointing, relative to that of Interleaved1F1B."""

Result = tuple[dict[str, float], list[str]]
"""Figures, and a text for each bound that is exceeded."""


def run(
    folder: Path,
    what: str,
    cases: dict[str, Any],
    microbatches: int,
    seq_len: int,
    rounds: int,
) -> Any:
    """Runs `pipeline_compute_run.py` and returns its result."""
    model = folder / "model-8 layers"
    if not model.exists():
        make_model(folder, "8 layers")
    job = {
        "what": what, "cases": cases, "microbatches": microbatches, "rounds": rounds,
        "model": str(model), "folder": str(folder), "seq_len": seq_len, "ranks": RANKS,
    }  # fmt: skip
    return run_job(RANKS, "pipeline_compute_run.py", job, timeout_seconds=900)


def compare_passes(rounds: int) -> Result:
    """Times passes under every schedule. ``auto`` must be about as fast as the best schedule."""
    figures: dict[str, float] = {}
    missed = []
    for mode in ("none", "full"):
        print(
            f"\nReal computation, {RANKS} ranks, checkpointing: {mode}; median (range) of a pass "
            "in ms"
        )
        columns = [_passes_of(mode, m, rounds) for m in COUNTS]
        print(f"{'':22}" + "".join(f"{f'm = {m}':>22}" for m in COUNTS))
        for name in LAYER_SCHEDULES:
            cells = [
                f"{1000 * statistics.median(s):.0f} ({1000 * min(s):.0f} to {1000 * max(s):.0f})"
                for s in (seconds[name] for seconds, _ in columns)
            ]
            print(f"{name:22}" + "".join(cell.rjust(22) for cell in cells))
        for m, (seconds, chosen) in zip(COUNTS, columns, strict=True):
            best = min(seconds, key=lambda name: statistics.median(seconds[name]))
            ratio = statistics.median(seconds[AUTO]) / statistics.median(seconds[best])
            figures[f"auto_over_best_{mode}_m{m}"] = ratio
            print(
                f"  {m} microbatches: auto selects {chosen}, which takes {ratio:.3f} of the time "
                f"of the best schedule, {best}"
            )
            if ratio > AUTO_MOST:
                missed.append(
                    f"auto takes {ratio:.3f} of the time of the best schedule with {m} "
                    f"microbatches, checkpointing {mode}"
                )
    return figures, missed


def _passes_of(mode: str, microbatches: int, rounds: int) -> tuple[dict[str, list[float]], str]:
    """Returns the seconds of each round by schedule, and the schedule that ``auto`` selects."""
    cases = {
        name: {"schedule": name, "ac": mode, "microbatches": microbatches}
        for name in LAYER_SCHEDULES
    }
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), "passes", cases, microbatches, SEQ_LEN, rounds)
    return found["seconds"], found["names"][AUTO]


def compare_processor_times(rounds: int) -> Result:
    """Compares I and W with whole backward passes, and replays passes with full checkpointing."""
    figures: dict[str, float] = {}
    missed = []
    print(f"\nProcessor time of I and W relative to whole backward passes, {RANKS} ranks")
    for mode, most in SPLIT_MOST.items():
        ac, _, compiled = mode.partition(", ")
        common = {"ac": ac, "compiled": bool(compiled), "early_blocks": 0}
        cases = {name: {"schedule": name} | common for name in ("Interleaved1F1B", "ZBVZeroBubble")}
        if ac == "full" and not compiled:
            cases |= {f"{n}, early": c | {"early_blocks": -1} for n, c in tuple(cases.items())}
        with tempfile.TemporaryDirectory() as folder:
            found = run(Path(folder), "processor", cases, REPLAYED, REPLAYED_SEQ_LEN, rounds)
        split, whole = (_total(found[name], kinds) for name, kinds in (
            ("ZBVZeroBubble", "IW"), ("Interleaved1F1B", "B"),
        ))  # fmt: skip
        figures[f"split_over_whole_{mode}"] = split / whole
        print(f"  checkpointing: {mode:16} {split / whole:.3f}")
        if split / whole > most:
            missed.append(
                f"I and W take {split / whole:.3f} of a whole backward pass, checkpointing {mode}"
            )
        if len(cases) > 2:
            more = replay(found)
            figures |= more[0]
            missed += more[1]
    return figures, missed


def replay(found: dict[str, list[Any]]) -> Result:
    """Replays processor times through the dependencies of their schedules."""
    # V-ZB has the same stages as ZBVZeroBubble, and orders their passes by these times.
    found = found | {
        label.replace("ZBVZeroBubble", "VZB"): times
        for label, times in found.items()
        if label.startswith("ZBVZeroBubble")
    }
    made = {label: _replayed(label.partition(",")[0], times) for label, times in found.items()}
    print(
        f"\nReplayed passes, full checkpointing, {RANKS} ranks, {REPLAYED} microbatches: time, and "
        "time relative to Interleaved1F1B"
    )
    figures, missed = {}, []
    for label, seconds in made.items():
        ratio = seconds / made["Interleaved1F1B"]
        figures[f"replayed_{label}"] = ratio
        print(f"  {label:24} {1000 * seconds:6.0f} ms   {ratio:.3f}")
        if ratio > REPLAY_MOST.get(label, ratio):
            missed.append(f"replayed, {label} takes {ratio:.3f} of the time of Interleaved1F1B")
    return figures, missed


def _replayed(name: str, times: list[Any]) -> float:
    """Returns the makespan of a schedule with the given times of each stage and kind of pass."""
    by_kind = {(stage, kind): seconds for stage, kind, seconds in times}
    num_stages = 1 + max(stage for stage, _ in by_kind)

    def cost(stage: int) -> StageCosts:
        forward, recompute, rest, weight, both = (
            by_kind.get((stage, kind), 0.0) for kind in ("F", "R", "I", "W", "B")
        )
        return StageCosts(
            forward, recompute + rest, weight,
            full_backward=recompute + both if both else None, recompute=recompute,
        )  # fmt: skip

    costs = Costs(tuple(cost(stage) for stage in range(num_stages)))
    row = SCHEDULES[name]
    table = row.make_table(RANKS, REPLAYED, costs)
    return simulate(table, costs).makespan


def _total(times: list[Any], kinds: str) -> float:
    return sum(seconds for _, kind, seconds in times if kind in kinds)
