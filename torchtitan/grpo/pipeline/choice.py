# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the fastest schedule for given times, under a bound of memory, and says why."""

from collections.abc import Sequence

from torchtitan.grpo.pipeline.schedules import AUTO_CANDIDATES, Schedule
from torchtitan.grpo.pipeline.simulate import Simulation, simulate
from torchtitan.grpo.pipeline.tables.actions import Table
from torchtitan.grpo.pipeline.tables.costs import Costs, StageCosts


def predict(
    costs: Costs, num_ranks: int, num_microbatches: int, rows: Sequence[Schedule]
) -> dict[str, tuple[Table, Simulation]]:
    """Simulates schedules.

    Args:
        costs: Costs of the stages, from the first layers to the last. Schedules place these
            stages on different ranks. Those with one stage a rank join neighbours if there are
            two a rank.
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches.
        rows: The schedules.
    """
    tried = {}
    for row in rows:
        its = costs_for(row, costs, num_ranks)
        per_rank = len(its.stages) // num_ranks
        table = row.make_table(num_ranks, num_microbatches, per_rank, its)
        tried[row.name] = table, simulate(table, its)
    return tried


def choose(tried: dict[str, tuple[Table, Simulation]], memory: float, num_ranks: int) -> str:
    """Returns the fastest schedule within the bound, or the one that holds least if none is.

    Args:
        tried: Simulations, with memory in microbatches of a rank's layers.
        memory: Bound, as a share of what 1F1B holds.
        num_ranks: Number of ranks.
    """
    found = {name: simulation for name, (_, simulation) in tried.items() if name in AUTO_CANDIDATES}
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
    recompute = 1000 * sum(s.recompute for s in stages) / len(stages)
    early = f"{recompute:.3g} ms of I can run before the gradient arrives. " if recompute else ""
    predictions = ", ".join(
        f"{name} {1000 * s.makespan:.4g} ms (idle {s.bubble:.1%}, holds {s.peak:g})"
        for name, (_, s) in tried.items()
    )
    return (
        f"The pipeline takes the schedule {chosen}. F, I and W of a stage take "
        f"{', '.join(times)} ms on average, and a tensor takes {1000 * costs.hop:.3g} ms from rank "
        f"to rank. {early}Predicted for {num_microbatches} microbatches: {predictions}."
    )


def costs_for(row: Schedule, costs: Costs, num_ranks: int) -> Costs:
    """Returns the costs of a schedule's stages from those that were measured.

    Args:
        row: The schedule.
        costs: Costs of as many stages as the schedule allows, or of two a rank.
        num_ranks: Number of ranks.
    """
    if row.allows_stages(len(costs.stages), num_ranks):
        return costs
    pairs = zip(costs.stages[::2], costs.stages[1::2], strict=True)
    joined = (
        StageCosts(
            a.forward + b.forward,
            a.input_grad + b.input_grad,
            a.weight_grad + b.weight_grad,
            activation=a.activation + b.activation,
            pending=a.pending + b.pending,
            recompute=b.recompute,  # the last blocks are recomputed early
        )
        for a, b in pairs
    )
    return Costs(tuple(joined), costs.hop)
