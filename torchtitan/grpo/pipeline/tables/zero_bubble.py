# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Zero-bubble tables that follow fixed rules: ZB-H1, ZB-H2, interleaved zero bubble, and ZBV.

All of them are from https://arxiv.org/abs/2401.10241. No other action waits for the gradients of
weights, W. These schedules therefore delay W to times at which a rank would otherwise be idle.
"""

from torchtitan.grpo.pipeline.tables.actions import Table, ranks_of_stages
from torchtitan.grpo.pipeline.tables.plain import RankOrder, interleave


def zb_h1(num_ranks: int, num_microbatches: int) -> Table:
    """Makes the table of ZB-H1, which holds at most as many microbatches as 1F1B.

    Its bubble is a third of that of 1F1B if F, I and W take equal times. The bubble within each rank's
    span is (p - 1) (F + I - W), where p is the number of ranks.
    """
    return _handcrafted(
        num_microbatches,
        [num_ranks - rank for rank in range(num_ranks)],
        list(range(num_ranks)),
    )


def zb_h2(num_ranks: int, num_microbatches: int) -> Table:
    """Makes the table of ZB-H2, which holds almost twice the memory of 1F1B.

    It has no bubble if F, I and W take equal times. With at least 2p - 1 microbatches on p ranks, the
    bubble within each rank's span is (p - 1) (F + I - 2W).
    """
    return _handcrafted(
        num_microbatches,
        [2 * (num_ranks - rank) - 1 for rank in range(num_ranks)],
        [2 * rank for rank in range(num_ranks)],
    )


def _handcrafted(num_microbatches: int, warm_ups: list[int], delays: list[int]) -> Table:
    """Makes a table with one stage on each rank.

    Args:
        num_microbatches: Number of microbatches.
        warm_ups: For each rank, the number of forward passes before its first I.
        delays: For each rank, the number of microbatches by which each W is delayed after its I.
    """
    orders = []
    for rank, (warm_up, delay) in enumerate(zip(warm_ups, delays, strict=True)):
        order = RankOrder()
        for step in range(num_microbatches + max(warm_up, delay)):
            # A step consists of one I, the W of the microbatch `delay` steps before, and the next F.
            if step == 0:
                for _ in range(min(warm_up, num_microbatches)):
                    order.add(rank, "F")
            if step < num_microbatches:
                order.add(rank, "I")
            if delay <= step < num_microbatches + delay:
                order.add(rank, "W")
            if step < num_microbatches - warm_up:
                order.add(rank, "F")
        orders.append(order.of(num_microbatches))
    return Table(ranks_of_stages(len(warm_ups), 1, "loop"), num_microbatches, tuple(orders))


def interleaved_zero_bubble(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2
) -> Table:
    """Makes the table of Interleaved1F1B with split backward passes.

    Rank r delays each W by r microbatches.

    Args:
        num_ranks: Number of ranks of the pipeline.
        num_microbatches: Number of microbatches.
        stages_per_rank: Number of stages that each rank holds.
    """
    return interleave(num_ranks, num_microbatches, stages_per_rank, splits_backward=True)


def zbv(num_ranks: int, num_microbatches: int) -> Table:
    """Makes the table of ZB-V: two stages on each rank in V placement, with the memory of 1F1B.

    If hops take no time and F, I and W take equal times, no rank waits within its span.
    """
    # The rule needs at least 2p - 1 microbatches. Passes of microbatches that do not exist are left
    # out.
    count = max(2 * num_ranks - 1, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        orders.append(_zbv_rank(rank, num_ranks, count).of(num_microbatches))
    return Table(ranks_of_stages(num_ranks, 2, "v"), num_microbatches, tuple(orders))


def _zbv_rank(rank: int, num_ranks: int, count: int) -> RankOrder:
    """Returns the order of one rank for ``count`` microbatches, which must be at least 2p - 1."""
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
