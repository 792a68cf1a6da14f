# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables that train two models, the second one while the first leaves ranks idle.

RLHFuse (https://arxiv.org/abs/2409.13221) places the second model's stages in the opposite direction:
the second model begins on the ranks that wait longest for the first model's first microbatch.
`Schedule.turns_second` says for which schedules this is done.
"""

from dataclasses import replace

from torchtitan.grpo.pipeline.tables.actions import Action, Costs, Table
from torchtitan.grpo.pipeline.tables.improve import improve
from torchtitan.grpo.pipeline.tables.simulate import Simulation, simulate


def opposite(table: Table) -> Table:
    """Returns the table of a model whose stages go from the last rank to the first one."""
    ranks = tuple(table.num_ranks - 1 - rank for rank in table.ranks)
    return replace(table, ranks=ranks, actions=table.actions[::-1])


def simulate_fused(table: Table, costs: Costs, *, turns: bool) -> tuple[Table, Simulation]:
    """Fuses the tables of two equal models, with the second in the opposite direction if it ``turns``."""
    both = replace(costs, stages=2 * costs.stages)
    fused = fuse(table, opposite(table) if turns else table, both)
    return fused, simulate(fused, both)


def fuse(first: Table, second: Table, costs: Costs) -> Table:
    """Returns the shortest table found that trains both models with the same microbatches.

    ``costs`` are those of the first model's stages and then of the second's. A rank holds at most one
    microbatch's activations more than if one model were trained after the other.
    """
    num, after = first.num_stages, _joined(first, second)
    models = (
        (first, replace(costs, stages=costs.stages[:num])),
        (second, replace(costs, stages=costs.stages[num:])),
    )
    alone = [simulate(table, own) for table, own in models]
    limit = max(simulation.peak for simulation in alone)
    limit += max(_memory_of_one(table, own) for table, own in models)
    # By their ends: a pass that recomputes starts before what it needs has ended.
    ends = alone[0].ends | {_moved(action, num): end for action, end in alone[1].ends.items()}
    side_by_side = tuple(tuple(sorted(actions, key=ends.__getitem__)) for actions in after.actions)
    # Further rounds gain less than a thousandth.
    return improve([after, replace(after, actions=side_by_side)], costs, limit, rounds=1)


def _memory_of_one(table: Table, costs: Costs) -> float:
    """Returns the memory of one microbatch's activations on the rank that needs most."""
    held = [0.0] * table.num_ranks
    for stage, rank in zip(costs.stages, table.ranks, strict=True):
        held[rank] += stage.activation
    return max(held)


def _moved(action: Action, num_stages: int) -> Action:
    return action._replace(stage=action.stage + num_stages)


def _joined(first: Table, second: Table) -> Table:
    """Returns a table that runs the first table and then the second."""
    num = first.num_stages
    actions = (
        (*one, *(_moved(action, num) for action in other))
        for one, other in zip(first.actions, second.actions, strict=True)
    )
    return replace(
        first,
        ranks=first.ranks + second.ranks,
        actions=tuple(actions),
        first_stages=(0, num),
    )
