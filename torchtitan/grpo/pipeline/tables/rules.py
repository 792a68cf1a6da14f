# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables that follow fixed rules: GPipe, 1F1B, Interleaved1F1B, ZB-H1, ZB-H2 and ZB-V.

Zero-bubble tables (https://arxiv.org/abs/2401.10241) split the backward pass into the gradients of
inputs, I, and those of weights, W. No other action waits for W, so W can fill idle times.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, cast

from torchtitan.grpo.pipeline.tables.actions import Action, Kind, Table, ranks_of_stages


class RankOrder:
    """Collects the actions of one rank, of which each kind takes a stage's microbatches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._counts: Counter[tuple[int, Kind]] = Counter()

    def add(self, stage: int, kind: Kind) -> None:
        self.actions.append(Action(stage, kind, self._counts[stage, kind]))
        self._counts[stage, kind] += 1

    def of(self, num_microbatches: int) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.microbatch < num_microbatches)

    def add_all(self, stage: int, kinds: Literal["FIW", "IW"]) -> None:
        for kind in kinds:
            self.add(stage, cast(Kind, kind))


def gpipe(num_ranks: int, num_microbatches: int) -> Table:
    """All F, and then all B (https://arxiv.org/abs/1811.06965)."""
    return _one_stage(num_microbatches, [num_microbatches] * num_ranks)


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Table:
    """1F1B (https://arxiv.org/abs/1806.03377), with the fewest microbatches in flight."""
    return _one_stage(num_microbatches, range(num_ranks, 0, -1))


def zb_h1(num_ranks: int, num_microbatches: int) -> Table:
    """ZB-H1 holds at most as many microbatches as 1F1B.

    Its bubble is a third of that of 1F1B if F, I and W take equal times. The bubble within each
    rank's span is (p - 1) (F + I - W) for p ranks.
    """
    return _one_stage(num_microbatches, range(num_ranks, 0, -1), range(num_ranks))


def zb_h2(num_ranks: int, num_microbatches: int) -> Table:
    """ZB-H2 holds almost twice the memory of 1F1B, and has no bubble if F, I and W are equal.

    With at least 2p - 1 microbatches on p ranks, the bubble within each rank's span is (p - 1)
    (F + I - 2W).
    """
    return _one_stage(num_microbatches, range(2 * num_ranks - 1, 0, -2), range(0, 2 * num_ranks, 2))


def _one_stage(
    num_microbatches: int, warm_ups: Sequence[int], delays: Sequence[int] | None = None
) -> Table:
    """Makes a table with one stage per rank; without ``delays``, backward passes are not split.

    Each rank has ``warm_ups`` forward passes before its first backward pass, and runs each W
    ``delays`` microbatches after its I.
    """
    orders = []
    for rank, warm_up in enumerate(warm_ups):
        order = RankOrder()
        for _ in range(min(warm_up, num_microbatches)):
            order.add(rank, "F")
        delay = 0 if delays is None else delays[rank]
        for step in range(num_microbatches + delay):
            # A step is one I or B, the W of the microbatch `delay` steps before, and the next F.
            if step < num_microbatches:
                order.add(rank, "B" if delays is None else "I")
            if delays is not None and step >= delay:
                order.add(rank, "W")
            if step < num_microbatches - warm_up:
                order.add(rank, "F")
        orders.append(tuple(order.actions))
    return Table(ranks_of_stages(len(warm_ups), 1, "loop"), num_microbatches, tuple(orders))


def interleave(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2, *, splits_backward: bool
) -> Table:
    """Makes Interleaved1F1B (https://arxiv.org/abs/2104.04473) or, with I and W, InterleavedZeroBubble.

    In a round, about as many microbatches as there are ranks pass through each of a rank's stages
    in turn. All rounds are equally long, so the last one may have unused places.
    With I and W, rank r delays each W by r microbatches, and warms up with fewer forward passes.
    """
    per_round = math.ceil(num_microbatches / max(1, num_microbatches // num_ranks))
    num_steps = math.ceil(num_microbatches / per_round) * per_round * stages_per_rank

    def local(step: int) -> int:
        return step // per_round % stages_per_rank

    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        # The next rank begins with fewer forward passes.
        ranks_below = num_ranks - 1 - rank
        warm_up = (stages_per_rank - 1) * per_round
        warm_up = min(warm_up + (1 if splits_backward else 2) * ranks_below, num_steps)
        delay = rank if splits_backward else 0
        order = RankOrder()
        for step in range(num_steps + warm_up + delay):
            if step < num_steps:
                order.add(stages[local(step)], "F")
            # Within a round, the last stage goes back first.
            if warm_up <= step < num_steps + warm_up:
                stage = stages[-1 - local(step - warm_up)]
                order.add(stage, "I" if splits_backward else "B")
            if splits_backward and step >= warm_up + delay:
                order.add(stages[-1 - local(step - warm_up - delay)], "W")
        orders.append(order.of(num_microbatches))
    return Table(
        ranks_of_stages(num_ranks, stages_per_rank, "loop"), num_microbatches, tuple(orders)
    )


def forward_only(ranks: tuple[int, ...], num_microbatches: int) -> Table:
    """On each rank, all microbatches pass through the first stage, and then through the next one."""
    actions = tuple(
        tuple(
            Action(stage, "F", microbatch)
            for stage, holder in enumerate(ranks)
            if holder == rank
            for microbatch in range(num_microbatches)
        )
        for rank in range(max(ranks) + 1)
    )
    return Table(ranks, num_microbatches, actions, is_forward_only=True)


def zbv(num_ranks: int, num_microbatches: int) -> Table:
    """ZB-V (https://arxiv.org/abs/2401.10241): two stages on each rank in V placement.

    ZB-V needs as much memory as 1F1B. If F, I and W take equal times and hops no time, no rank is idle
    between its first and its last action.
    """
    # The rule needs at least 2p - 1 microbatches. Passes of microbatches that do not exist are left
    # out.
    count = max(2 * num_ranks - 1, num_microbatches)
    orders = (_zbv_rank(rank, num_ranks, count).of(num_microbatches) for rank in range(num_ranks))
    return Table(ranks_of_stages(num_ranks, 2, "v"), num_microbatches, tuple(orders))


def _zbv_rank(rank: int, num_ranks: int, count: int) -> RankOrder:
    """Returns one rank's order in ZB-V; p ranks need a ``count`` of at least 2p - 1 microbatches."""
    down, up, to_turn = rank, 2 * num_ranks - 1 - rank, num_ranks - rank
    order = RankOrder()
    for _ in range(2 * to_turn - 1):
        order.add(down, "F")
    for _ in range(rank):
        order.add(up, "F")
        order.add(down, "F")
    for _ in range(to_turn):
        order.add_all(up, "FIW")
    forwards = 2 * to_turn - 1 + rank
    for step in range(count - num_ranks):
        order.add_all(down, "FIW" if forwards + step < count else "IW")
        order.add_all(up, "FIW")
    for _ in range(rank):
        order.add(down, "I")
        order.add(up, "I")
    for _ in range(to_turn):
        order.add_all(down, "IW")
    for stage in (up, down):
        for _ in range(rank):
            order.add(stage, "W")
    return order
