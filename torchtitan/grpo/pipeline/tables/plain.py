# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables in which the backward pass is one action: GPipe, 1F1B and Interleaved1F1B.

The module also holds what interleaved zero-bubble tables share with Interleaved1F1B.
"""

import math
from collections import Counter
from typing import Literal, cast

from torchtitan.grpo.pipeline.tables.actions import Action, Kind, Table, ranks_of_stages


class RankOrder:
    """The actions of one rank, to which a generator appends.

    Each kind of action of each stage goes through the microbatches in order.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._counts: Counter[tuple[int, Kind]] = Counter()

    def add(self, stage: int, kind: Kind) -> None:
        """Appends an action for the next microbatch."""
        self.actions.append(Action(stage, kind, self._counts[stage, kind]))
        self._counts[stage, kind] += 1

    def of(self, num_microbatches: int) -> tuple[Action, ...]:
        """Returns the actions of the first ``num_microbatches`` microbatches."""
        return tuple(action for action in self.actions if action.microbatch < num_microbatches)

    def add_all(self, stage: int, kinds: Literal["FIW", "IW"]) -> None:
        """Appends several actions of one stage."""
        for kind in kinds:
            self.add(stage, cast(Kind, kind))


def gpipe(num_ranks: int, num_microbatches: int) -> Table:
    """Makes the table of GPipe: all forward passes, and then all backward passes.

    See https://arxiv.org/abs/1811.06965.
    """
    return Table(
        ranks_of_stages(num_ranks, 1, "loop"),
        num_microbatches,
        tuple(
            tuple(Action(rank, kind, i) for kind in ("F", "B") for i in range(num_microbatches))
            for rank in range(num_ranks)
        ),
    )


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Table:
    """Makes the table of 1F1B, in which as few microbatches as possible are in flight.

    See https://arxiv.org/abs/1806.03377.
    """
    orders = []
    for rank in range(num_ranks):
        order = RankOrder()
        in_flight = min(num_ranks - 1 - rank, num_microbatches)
        for _ in range(in_flight):
            order.add(rank, "F")
        for _ in range(num_microbatches - in_flight):
            order.add(rank, "F")
            order.add(rank, "B")
        for _ in range(in_flight):
            order.add(rank, "B")
        orders.append(order.of(num_microbatches))
    return Table(ranks_of_stages(num_ranks, 1, "loop"), num_microbatches, tuple(orders))


def interleaved_one_forward_one_backward(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2
) -> Table:
    """Makes the table of Interleaved1F1B (https://arxiv.org/abs/2104.04473).

    Args:
        num_ranks: Number of ranks of the pipeline.
        num_microbatches: Number of microbatches.
        stages_per_rank: Number of stages that each rank holds.
    """
    return interleave(num_ranks, num_microbatches, stages_per_rank, splits_backward=False)


def interleave(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, *, splits_backward: bool
) -> Table:
    """Makes an interleaved table with backward passes B or, if they are split, I and W.

    With split backward passes, rank r delays each W by r microbatches, and a rank needs fewer forward
    passes to warm up.
    """
    orders = []
    for rank in range(num_ranks):
        rounds = Rounds(num_ranks, num_microbatches, stages_per_rank, rank)
        warm_up = rounds.warm_up(steps_to_neighbor=1 if splits_backward else 2)
        delay = rank if splits_backward else 0
        order = RankOrder()
        for step in range(rounds.num_steps + warm_up + delay):
            if step < rounds.num_steps:
                order.add(rounds.stage(step), "F")
            if warm_up <= step < rounds.num_steps + warm_up:
                stage = rounds.backward_stage(step - warm_up)
                order.add(stage, "I" if splits_backward else "B")
            if splits_backward and step >= warm_up + delay:
                order.add(rounds.backward_stage(step - warm_up - delay), "W")
        orders.append(order.of(num_microbatches))
    return Table(
        ranks_of_stages(num_ranks, stages_per_rank, "loop"), num_microbatches, tuple(orders)
    )


def forward_only(ranks: tuple[int, ...], num_microbatches: int) -> Table:
    """Makes a table without backward passes.

    On each rank, all microbatches pass through the first stage, and then through the next stage.

    Args:
        ranks: For each stage of the pipeline, the rank that holds the stage.
        num_microbatches: Number of microbatches.
    """
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


class Rounds:
    """The order in which a rank of an interleaved schedule runs its stages.

    In a round, about as many microbatches as there are ranks pass through the rank's first stage,
    then the same microbatches pass through its second stage, and so on. All rounds are equally long,
    so that the last round may contain passes of microbatches that do not exist.
    """

    def __init__(
        self, num_ranks: int, num_microbatches: int, stages_per_rank: int, rank: int
    ) -> None:
        self.num_ranks, self.stages_per_rank, self.rank = num_ranks, stages_per_rank, rank
        self.per_round = math.ceil(num_microbatches / max(1, num_microbatches // num_ranks))
        rounds = math.ceil(num_microbatches / self.per_round)
        self.num_steps = rounds * self.per_round * stages_per_rank

    def warm_up(self, steps_to_neighbor: int) -> int:
        """Returns the number of forward passes before the first backward pass of the rank.

        Args:
            steps_to_neighbor: Number of forward passes by which the next rank has fewer.
        """
        ranks_below = self.num_ranks - 1 - self.rank
        passes = (self.stages_per_rank - 1) * self.per_round + steps_to_neighbor * ranks_below
        return min(passes, self.num_steps)

    def stage(self, step: int) -> int:
        """Returns the stage of the forward pass in a step."""
        return step // self.per_round % self.stages_per_rank * self.num_ranks + self.rank

    def backward_stage(self, step: int) -> int:
        """Returns the stage of the backward pass in a step.

        Within a round, the last stage comes first.
        """
        local = self.stages_per_rank - 1 - step // self.per_round % self.stages_per_rank
        return local * self.num_ranks + self.rank
