# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Actions of pipeline ranks, and the tables that define the order in which the ranks run them.

A table is data: generators make it, the simulator evaluates it, and the runtime runs it. No module in
this package imports torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "I", "W", "B", "G"]
"""The kind of an action.

F is a forward pass, I computes the gradient of the input, W computes the gradients of the weights, and
B computes both at once. G is the forward pass of a row that belongs to another pass and fills a gap
(`gaps.py`).
"""

Placement = Literal["loop", "v"]
"""The assignment of stages to ranks; see :func:`ranks_of_stages`."""


class Action(NamedTuple):
    """One pass of one microbatch through one stage.

    ``str()`` writes the forward pass of microbatch 2 through stage 5 as ``5F2``.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def after(self, num_stages: int) -> Iterator["tuple[Action, ...]"]:
        """Yields the actions that must be complete before this one can run.

        Each item is a tuple of alternatives. Exactly one of them is in the table.
        """
        stage, kind, microbatch = self
        if kind in ("F", "G"):
            if stage > 0:
                yield (Action(stage - 1, kind, microbatch),)
        elif kind == "W":
            yield (Action(stage, "I", microbatch),)
        else:
            yield (Action(stage, "F", microbatch),)
            if stage < num_stages - 1:
                yield (Action(stage + 1, "I", microbatch), Action(stage + 1, "B", microbatch))


@dataclass(frozen=True)
class Table:
    """The order of the actions of each pipeline rank.

    Attributes:
        ranks: For each stage of the pipeline, the rank that holds the stage.
        num_microbatches: Number of microbatches that pass through the pipeline.
        actions: For each rank, its actions in order.
        is_forward_only: Whether there are no backward passes.
        num_gap_microbatches: Number of microbatches that pass through the stages in actions G.
    """

    ranks: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    is_forward_only: bool = False
    num_gap_microbatches: int = 0

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.actions)


def ranks_of_stages(num_ranks: int, stages_per_rank: int, placement: Placement) -> tuple[int, ...]:
    """Returns the rank of each stage.

    Under ``loop``, stage s lies on rank s mod p, where p is the number of ranks. Under ``v``, the
    stages go down the ranks and then up again, so that rank 0 holds the first and the last stage of
    each pair of rounds.
    """
    down, up = tuple(range(num_ranks)), tuple(reversed(range(num_ranks)))
    rounds = [up if placement == "v" and i % 2 else down for i in range(stages_per_rank)]
    return tuple(rank for ranks in rounds for rank in ranks)
