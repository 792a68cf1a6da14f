# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the fastest schedule for given times, under a bound of memory, and says why."""

from torchtitan.grpo.pipeline.schedules import SCHEDULES, Schedule
from torchtitan.grpo.pipeline.simulate import Simulation, simulate
from torchtitan.grpo.pipeline.tables.actions import Table
from torchtitan.grpo.pipeline.tables.costs import Costs, StageCosts

# Where schedules take equally long, the first one is chosen.
_CANDIDATES = (
    "1F1B",
    "Interleaved1F1B",
    "ZBH1",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "VZB",
    "VHalf",
    "VMin",
    "ZBH2",
)


def predict(costs: Costs, num_microbatches: int) -> dict[str, tuple[Table, Simulation]]:
    """Simulates every schedule that can be chosen.

    Args:
        costs: Costs of stages, two a rank, from the first layers to the last. Schedules place
            these stages on different ranks, and those with one stage a rank join neighbours.
        num_microbatches: Number of microbatches.
    """
    num_ranks = len(costs.stages) // 2
    tried = {}
    for name in _CANDIDATES:
        row = SCHEDULES[name]
        its = costs_for(row, costs)
        table = row.make_table(num_ranks, num_microbatches, row.stages_per_rank, its)
        tried[name] = table, simulate(table, its)
    return tried


def choose(tried: dict[str, tuple[Table, Simulation]], memory: float, num_ranks: int) -> str:
    """Returns the fastest schedule within the bound, or the one that holds least if none is.

    Args:
        tried: Simulations, with memory in microbatches of a rank's layers.
        memory: Bound, as a share of what 1F1B holds.
        num_ranks: Number of ranks.
    """
    found = {name: simulation for name, (_, simulation) in tried.items() if name in _CANDIDATES}
    fitting = [name for name, s in found.items() if s.peak <= memory * num_ranks + 1e-9]
    if not fitting:
        return min(found, key=lambda name: found[name].peak)
    return min(fitting, key=lambda name: found[name].makespan)


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
    return (
        f"The pipeline takes the schedule {chosen}. F, I and W of a stage take "
        f"{', '.join(times)} ms on average. Predicted for {num_microbatches} microbatches: "
        f"{predictions}."
    )


def costs_for(row: Schedule, costs: Costs) -> Costs:
    """Returns the costs of a schedule's stages from those of two stages a rank."""
    if row.stages_per_rank == 2:
        return costs
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
