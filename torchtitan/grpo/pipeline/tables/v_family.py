# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Zero-bubble schedules in V placement that hold a chosen amount of memory: V-Min, V-Half, V-ZB.

They repeat a building block, the passes of one microbatch, once a period. How long a rank keeps a
microbatch within the block decides how much memory the schedule holds
(https://arxiv.org/abs/2405.15362). Repeated blocks leave gaps at the beginning and the end of the
step, and wherever times are not those for which the block was made. `improve.py` closes them.
"""

import itertools
from collections.abc import Iterator

from torchtitan.grpo.pipeline.tables.actions import Action, Kind, Table, ranks_of_stages
from torchtitan.grpo.pipeline.tables.costs import Costs
from torchtitan.grpo.pipeline.tables.improve import improve
from torchtitan.grpo.pipeline.tables.zero_bubble import zbv

Block = dict[tuple[int, Kind], int]
"""When each pass of one microbatch starts: the cell of time of a stage's F, I or W."""

_PERIOD = 6
"""Cells of a period. A rank has two stages, with an F, an I and a W of one cell each."""

_NEXT = (1, 1, 1, 1)


def v_min(num_ranks: int, num_microbatches: int, costs: Costs) -> Table:
    """V-Min: about a third of 1F1B's memory. Its bubble is large unless all times are equal."""
    return _v_schedule(num_microbatches, costs, _NEXT, (num_ranks + 4) // 3)


def v_half(num_ranks: int, num_microbatches: int, costs: Costs) -> Table:
    """V-Half: about half of 1F1B's memory."""
    return _v_schedule(num_microbatches, costs, (2, 1, 2, 1), (num_ranks + 2) // 2)


def v_zb(num_ranks: int, num_microbatches: int, costs: Costs) -> Table:
    """V-ZB: the memory of 1F1B. Without hops and at equal times, no rank waits in its span."""
    return _v_schedule(num_microbatches, costs, (4, 2, 4, 2), num_ranks)


def _v_schedule(
    num_microbatches: int, costs: Costs, offsets: tuple[int, int, int, int], microbatches_held: int
) -> Table:
    """Makes a table of at most so many whole microbatches' memory a rank.

    Args:
        num_microbatches: Number of microbatches.
        costs: Times and memories, of two stages a rank. They shape the table; the memory is
            counted in stages, because ranks run out of it one by one.
        offsets: Cells between neighbouring ranks in the forward passes down and up the ranks, and
            in the backward passes down and up.
        microbatches_held: Bound of the memory, in microbatches of both stages of a rank.
    """
    num_ranks = len(costs.stages) // 2
    unit = costs.with_unit_memory()
    starts = [
        repeated(block, num_ranks, num_microbatches)
        for block in _blocks(num_ranks, (offsets, _NEXT))
        if held(block, num_ranks) <= 2 * microbatches_held
    ]
    if microbatches_held == num_ranks:
        starts.append(zbv(num_ranks, num_microbatches))
    return improve(starts, unit, 2 * microbatches_held)


def _blocks(num_ranks: int, offsets: tuple[tuple[int, ...], ...]) -> Iterator[Block]:
    """Yields blocks with these offsets, turning at once or a cell later at one of the ends."""
    found = []
    for own, turns in itertools.product(dict.fromkeys(offsets), ((0, 0, 0), (0, 1, 0), (1, 0, 0))):
        block = building_block(num_ranks, own, turns)
        if block not in found:
            found.append(block)
            yield block


def building_block(num_ranks: int, offsets: tuple[int, ...], turns: tuple[int, ...]) -> Block:
    """Places the passes of one microbatch so that the same places a period later are free.

    Args:
        num_ranks: Ranks of the pipeline.
        offsets: See :func:`_v_schedule`. A pass is placed later if its cell is taken.
        turns: Cells that pass additionally where the microbatch turns: at the last rank, at the
            last stage, and at the last rank again.
    """
    num_stages = 2 * num_ranks
    ranks = ranks_of_stages(num_ranks, 2, "v")
    taken: list[set[int]] = [set() for _ in range(num_ranks)]
    block: Block = {}

    def place(stage: int, kind: Kind, earliest: int) -> int:
        cells = taken[ranks[stage]]
        cell = next(c for c in range(earliest, earliest + _PERIOD) if c % _PERIOD not in cells)
        cells.add(cell % _PERIOD)
        block[stage, kind] = cell
        return cell

    down, up = range(num_ranks), range(num_ranks, num_stages)
    legs: list[tuple[Kind, range]] = [("F", down), ("F", up), ("I", up[::-1]), ("I", down[::-1])]
    cell = -1
    for (kind, stages), offset, turn in zip(legs, offsets, (0, *turns), strict=True):
        for stage in stages:
            cell = place(stage, kind, cell + (1 + turn if stage == stages[0] else offset))
    for stage in sorted(range(num_stages), key=lambda s: block[s, "I"]):
        place(stage, "W", block[stage, "I"] + 1)
    return block


def held(block: Block, num_ranks: int) -> int:
    """Returns the most microbatches of a stage that a rank holds if the block is repeated."""
    ranks = ranks_of_stages(num_ranks, 2, "v")
    most = 0
    for cell, rank in itertools.product(range(_PERIOD), range(num_ranks)):
        # A stage holds a microbatch from its F to the end of its W, one for each period.
        most = max(
            most,
            sum(
                (block[stage, "W"] - cell) // _PERIOD - (block[stage, "F"] - 1 - cell) // _PERIOD
                for stage, holder in enumerate(ranks)
                if holder == rank
            ),
        )
    return most


def repeated(block: Block, num_ranks: int, num_microbatches: int) -> Table:
    """Returns the table in which each microbatch has its block a period after the one before."""
    ranks = ranks_of_stages(num_ranks, 2, "v")
    timed: list[list[tuple[int, Action]]] = [[] for _ in range(num_ranks)]
    for (stage, kind), cell in block.items():
        for microbatch in range(num_microbatches):
            action = Action(stage, kind, microbatch)
            timed[ranks[stage]].append((cell + _PERIOD * microbatch, action))
    return Table(
        ranks, num_microbatches, tuple(tuple(action for _, action in sorted(t)) for t in timed)
    )
