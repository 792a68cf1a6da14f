# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the fastest V schedule for given times, under a bound of memory, and says why."""

from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.simulate import Simulation, simulate
from torchtitan.grpo.pipeline.tables.actions import Table
from torchtitan.grpo.pipeline.tables.costs import Costs, StageCosts

_CANDIDATES = ("VZB", "ZBVZeroBubble", "VHalf", "VMin")
_BASELINES = ("1F1B", "Interleaved1F1B")


def predict(costs: Costs, num_microbatches: int) -> dict[str, tuple[Table, Simulation]]:
    """Simulates the V schedules and, for comparison, 1F1B and Interleaved1F1B.

    Args:
        costs: Costs of the stages, two a rank, from the first layers to the last.
        num_microbatches: Number of microbatches.
    """
    num_ranks = len(costs.stages) // 2
    tried = {}
    for name in (*_CANDIDATES, *_BASELINES):
        row = SCHEDULES[name]
        its = costs if row.stages_per_rank == 2 else _with_stages_joined(costs)
        table = row.make_table(num_ranks, num_microbatches, row.stages_per_rank, its)
        tried[name] = table, simulate(table, its)
    return tried


def choose(tried: dict[str, tuple[Table, Simulation]], memory: float, num_ranks: int) -> str:
    """Returns the fastest candidate within the bound, or the one that holds least if none is."""
    found = {name: tried[name][1] for name in _CANDIDATES}
    fitting = [name for name, s in found.items() if s.peak <= memory * num_ranks + 1e-9]
    if not fitting:
        return min(found, key=lambda name: found[name].peak)
    return min(fitting, key=lambda name: (found[name].makespan, found[name].peak))


def describe(
    tried: dict[str, tuple[Table, Simulation]], chosen: str, costs: Costs, num_microbatches: int
) -> str:
    """Returns why a schedule was chosen."""
    stages = costs.stages
    times = (
        f"{1000 * sum(times) / len(stages):.3g}"
        for times in (
            [s.forward for s in stages],
            [s.input_grad for s in stages],
            [s.weight_grad for s in stages],
        )
    )
    predictions = ", ".join(
        f"{name} {1000 * s.makespan:.4g} ms (idle {s.bubble:.1%}, holds {s.peak:g})"
        for name, (_, s) in tried.items()
    )
    text = (
        f"The pipeline takes the schedule {chosen}. F, I and W of a stage take "
        f"{', '.join(times)} ms on average. Predicted for {num_microbatches} microbatches: "
        f"{predictions}."
    )
    faster = [n for n in _BASELINES if tried[n][1].makespan < tried[chosen][1].makespan]
    if faster:
        text += (
            f" {' and '.join(faster)} would be faster, with another placement of the stages: set "
            f'parallelism.pipeline_parallel_schedule = "{faster[-1]}".'
        )
    return text


def _with_stages_joined(costs: Costs) -> Costs:
    """Returns the costs of half as many stages, each with the layers of two neighbours."""
    pairs = zip(costs.stages[::2], costs.stages[1::2], strict=True)
    joined = (
        StageCosts(
            a.forward + b.forward,
            a.input_grad + b.input_grad,
            a.weight_grad + b.weight_grad,
            activation=a.activation + b.activation,
            pending=a.pending + b.pending,
        )
        for a, b in pairs
    )
    return Costs(tuple(joined), costs.hop)
