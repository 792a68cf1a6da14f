# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Fills the idle time of a table with forward passes of other rows (PipeFill, arxiv.org/abs/2410.07192).

For example, the rows of a later minibatch pass through the reference model.
"""

from dataclasses import replace

from torchtitan.grpo.pipeline.tables.actions import Action, Costs, Table
from torchtitan.grpo.pipeline.tables.simulate import Simulation, simulate

Gaps = list[list[tuple[float, float]]]
"""For each rank, the start and the end of each of its idle times, in order."""
_ROUNDING = 1e-9
"""Relative rounding error by which equal sums of times may differ."""


def fill_gaps(table: Table, costs: Costs, limit: int) -> Table:
    """Adds up to ``limit`` other microbatches where ranks would wait; no action is delayed.

    A microbatch is added only if its passes through all stages fit.
    """
    simulation = simulate(table, costs)
    gaps = _gaps_of(table, simulation)
    placed: list[list[tuple[float, Action]]] = [[] for _ in table.actions]
    added = 0
    while added < limit and (found := _place(added, table, costs, gaps)) is not None:
        starts, gaps = found
        for action, start in starts:
            placed[table.ranks[action.stage]].append((start, action))
        added += 1
    for rank, actions in enumerate(table.actions):
        placed[rank] += [(simulation.starts[action], action) for action in actions]
    actions = tuple(tuple(action for _, action in sorted(of_rank)) for of_rank in placed)
    return replace(table, actions=actions, num_gap_microbatches=added)


def idle_before(table: Table, simulation: Simulation, rank: int) -> list[float]:
    """Returns how long a rank waits before each of its passes. The time after its last pass does not
    count as idle: the optimizer step follows.
    """
    actions = table.actions[rank]
    free_at = [0.0, *(simulation.ends[action] for action in actions)]
    return [
        max(0.0, simulation.starts[action] - free)
        for action, free in zip(actions, free_at, strict=False)
    ]


def _gaps_of(table: Table, simulation: Simulation) -> Gaps:
    """Returns each rank's idle times until the last rank has ended."""
    gaps: Gaps = []
    for actions in table.actions:
        ends = [0.0, *(simulation.ends[action] for action in actions)]
        starts = [*(simulation.starts[action] for action in actions), simulation.makespan]
        gaps.append([gap for gap in zip(ends, starts, strict=True) if gap[1] > gap[0]])
    return gaps


def _place(
    microbatch: int, table: Table, costs: Costs, gaps: Gaps
) -> tuple[list[tuple[Action, float]], Gaps] | None:
    """Returns a microbatch's earliest start in each stage, and the gaps left; None if it does not fit."""
    ready, starts, left = 0.0, [], list(gaps)
    for stage in table.gap_stages:
        rank, action = table.ranks[stage], Action(stage, "G", microbatch)
        time = costs.time(action)
        begins = ((max(begin, ready), end) for begin, end in left[rank])
        fits = (begin for begin, end in begins if begin + time <= end * (1 + _ROUNDING))
        start = next(fits, None)
        if start is None:
            return None
        starts.append((action, start))
        left[rank] = _without(left[rank], start, start + time)
        travels = not table.is_last(stage) and table.ranks[stage + 1] != rank
        ready = start + time + (costs.hop if travels else 0.0)
    return starts, left


def _without(
    gaps: list[tuple[float, float]], begin: float, end: float
) -> list[tuple[float, float]]:
    """Returns the gaps without the time from ``begin`` to ``end``, which must lie in one of them."""
    left = []
    for gap in gaps:
        if gap[0] <= begin < gap[1]:
            left += [part for part in ((gap[0], begin), (end, gap[1])) if part[1] > part[0]]
        else:
            left.append(gap)
    return left
