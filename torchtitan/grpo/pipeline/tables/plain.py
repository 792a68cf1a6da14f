# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Orders of actions in which the backward pass is one action: GPipe, 1F1B and Interleaved1F1B."""

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
        """Returns the actions of the microbatches that exist."""
        return tuple(action for action in self.actions if action.microbatch < num_microbatches)

    def add_all(self, stage: int, kinds: Literal["FIW", "IW"]) -> None:
        """Appends several actions of one stage."""
        for kind in kinds:
            self.add(stage, cast(Kind, kind))


def gpipe(num_ranks: int, num_microbatches: int) -> Table:
    """All forward passes, then all backward passes (https://arxiv.org/abs/1811.06965)."""
    return Table(
        ranks_of_stages(num_ranks, 1, "loop"),
        num_microbatches,
        tuple(
            tuple(Action(rank, kind, i) for kind in ("F", "B") for i in range(num_microbatches))
            for rank in range(num_ranks)
        ),
    )


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Table:
    """1F1B (https://arxiv.org/abs/1806.03377): as few microbatches as possible are in flight."""
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
    """Interleaved1F1B (https://arxiv.org/abs/2104.04473).

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Number of microbatches.
        stages_per_rank: Stages that each rank holds.
    """
    return interleave(num_ranks, num_microbatches, stages_per_rank, splits_backward=False)


def interleave(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, *, splits_backward: bool
) -> Table:
    """Makes an interleaved table, whose backward passes are B, or I and W.

    Rank r delays each W by r microbatches, and then needs fewer forward passes to warm up.
    """
    orders = []
    for rank in range(num_ranks):
        rounds = Rounds(num_ranks, num_microbatches, stages_per_rank, rank)
        warm_up = rounds.warm_up(steps_to_neighbour=1 if splits_backward else 2)
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
    """Forward passes alone: all microbatches pass a rank's first stage, then its next one.

    Args:
        ranks: For each stage of the pipeline, the rank that holds it.
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
    """The stages through which a rank of an interleaved schedule goes, step by step.

    About as many microbatches as there are ranks pass the rank's first stage, then the same ones
    its second stage, and so on; the next round follows. All rounds are equally long, so that the
    last one may have passes of microbatches that do not exist.
    """

    def __init__(
        self, num_ranks: int, num_microbatches: int, stages_per_rank: int, rank: int
    ) -> None:
        self.num_ranks, self.stages_per_rank, self.rank = num_ranks, stages_per_rank, rank
        self.per_round = math.ceil(num_microbatches / max(1, num_microbatches // num_ranks))
        rounds = math.ceil(num_microbatches / self.per_round)
        self.num_steps = rounds * self.per_round * stages_per_rank

    def warm_up(self, steps_to_neighbour: int) -> int:
        """Forward passes before the first backward pass of a rank.

        Args:
            steps_to_neighbour: By how many there are fewer on the next rank.
        """
        ranks_below = self.num_ranks - 1 - self.rank
        passes = (self.stages_per_rank - 1) * self.per_round + steps_to_neighbour * ranks_below
        return min(passes, self.num_steps)

    def stage(self, step: int) -> int:
        """Stage of a forward pass."""
        return step // self.per_round % self.stages_per_rank * self.num_ranks + self.rank

    def backward_stage(self, step: int) -> int:
        """Stage of a backward pass. Within a round, the last stage comes first."""
        local = self.stages_per_rank - 1 - step // self.per_round % self.stages_per_rank
        return local * self.num_ranks + self.rank
