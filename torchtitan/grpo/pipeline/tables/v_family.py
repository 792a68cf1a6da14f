# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Zero-bubble schedules in V placement with a chosen amount of memory: V-Min, V-Half and V-ZB.

These schedules repeat a building block, the passes of one microbatch, once per period. The time for which
a rank keeps a microbatch determines the memory (https://arxiv.org/abs/2405.15362). `improve.py`
closes the gaps at both ends, and those that arise because real times differ from the block's.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from torchtitan.grpo.pipeline.tables.actions import Action, Costs, Kind, Table, ranks_of_stages
from torchtitan.grpo.pipeline.tables.improve import improve
from torchtitan.grpo.pipeline.tables.rules import zbv

Block = dict[tuple[int, Kind], int]
"""The start of each pass of one microbatch, in cells, by stage and kind of pass."""

_PERIOD = 6
"""Number of cells in a period. A rank has two stages with an F, an I and a W of one cell each."""

_NEXT = (1, 1, 1, 1)


def v_min(num_ranks: int, num_microbatches: int, costs: Costs) -> Table:
    """V-Min: needs about a third of 1F1B's memory. Its bubble is large unless all times are equal."""
    return _v_schedule(num_microbatches, costs, _NEXT, (num_ranks + 4) // 3)


def v_half(num_ranks: int, num_microbatches: int, costs: Costs) -> Table:
    """V-Half: needs about half of 1F1B's memory."""
    return _v_schedule(num_microbatches, costs, (2, 1, 2, 1), (num_ranks + 2) // 2)


def v_zb(num_ranks: int, num_microbatches: int, costs: Costs) -> Table:
    """V-ZB: needs as much memory as 1F1B. With equal times and no hops, no rank waits between its passes."""
    return _v_schedule(num_microbatches, costs, (4, 2, 4, 2), num_ranks)


def _v_schedule(
    num_microbatches: int, costs: Costs, offsets: tuple[int, int, int, int], microbatches_held: int
) -> Table:
    """Makes a table in which a rank holds at most ``microbatches_held`` microbatches.

    ``offsets`` are the numbers of time cells between neighboring ranks: in the forward passes down and
    then up the ranks, and in the backward passes down and then up.
    """
    num_ranks = len(costs.stages) // 2
    in_units = tuple(replace(stage, activation=1.0, pending=1.0) for stage in costs.stages)
    starts = [
        repeated(block, num_ranks, num_microbatches)
        for block in _blocks(num_ranks, (offsets, _NEXT))
        if held(block, num_ranks) <= 2 * microbatches_held
    ]
    if microbatches_held == num_ranks:
        starts.append(zbv(num_ranks, num_microbatches))
    return improve(starts, replace(costs, stages=in_units), 2 * microbatches_held)


def _blocks(num_ranks: int, offsets: tuple[tuple[int, ...], ...]) -> Iterator[Block]:
    """Yields building blocks. In some, the microbatch waits a cell longer where it turns at an end of the V."""
    found = []
    for own, turns in itertools.product(offsets, ((0, 0, 0), (0, 1, 0), (1, 0, 0))):
        block = building_block(num_ranks, own, turns)
        if block not in found:
            found.append(block)
            yield block


def building_block(num_ranks: int, offsets: tuple[int, ...], turns: tuple[int, ...]) -> Block:
    """Places the passes of one microbatch so that the block can be repeated once per period.

    A pass is placed later than ``offsets`` say if the rank is busy in that cell.

    ``turns`` are additional cells at the last rank, at the last stage, and at the last rank again.
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
    """Returns the most microbatches that a rank holds, summed over its stages, if the block is repeated."""
    ranks = ranks_of_stages(num_ranks, 2, "v")

    def held_at(cell: int, rank: int) -> int:
        # A stage holds a microbatch from its F to the end of its W. One microbatch starts per period.
        return sum(
            (block[stage, "W"] - cell) // _PERIOD - (block[stage, "F"] - 1 - cell) // _PERIOD
            for stage, holder in enumerate(ranks)
            if holder == rank
        )

    return max(itertools.starmap(held_at, itertools.product(range(_PERIOD), range(num_ranks))))


def repeated(block: Block, num_ranks: int, num_microbatches: int) -> Table:
    """Returns the table in which each microbatch's block begins a period after the previous one's."""
    ranks = ranks_of_stages(num_ranks, 2, "v")
    timed: list[list[tuple[int, Action]]] = [[] for _ in range(num_ranks)]
    for (stage, kind), cell in block.items():
        for microbatch in range(num_microbatches):
            action = Action(stage, kind, microbatch)
            timed[ranks[stage]].append((cell + _PERIOD * microbatch, action))
    return Table(
        ranks, num_microbatches, tuple(tuple(action for _, action in sorted(t)) for t in timed)
    )
