# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Actions of pipeline ranks, their costs, and the tables that order them. Does not import torch."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "I", "W", "B", "G"]
"""The kind of an action.

F is a forward pass, I computes the gradient of the input, W those of the weights, and B both at
once. G is the forward pass of a row of another pass, which fills a gap (`gaps.py`).
"""

Placement = Literal["loop", "v", "helix"]


class Action(NamedTuple):
    """One pass of a microbatch through a stage; ``5F2`` is microbatch 2's forward pass through stage 5."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def after(self, table: "Table") -> Iterator["tuple[Action, ...]"]:
        """Yields what must be complete before this action. Of each tuple, the table contains one action."""
        stage, kind, microbatch = self
        if kind in ("F", "G"):
            if not table.is_first(stage):
                yield (Action(stage - 1, kind, microbatch),)
        elif kind == "W":
            yield (Action(stage, "I", microbatch),)
        else:
            yield (Action(stage, "F", microbatch),)
            if not table.is_last(stage):
                yield (Action(stage + 1, "I", microbatch), Action(stage + 1, "B", microbatch))


@dataclass(frozen=True)
class Table:
    """Each rank's order of actions, and each stage's rank. G are forward passes of gap microbatches.

    A table may train several models with the same microbatches. Their stages are numbered one after
    another, and ``first_stages`` are the numbers of the models' first stages. Gap microbatches pass
    through the stages of the first model.

    A stage without weights may be on another rank for each microbatch: with ``shifts``, microbatch
    m of stage s is on rank ``ranks[s] + shifts[s] * m``, modulo the number of ranks.
    """

    ranks: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    is_forward_only: bool = False
    num_gap_microbatches: int = 0
    shifts: tuple[int, ...] = ()
    first_stages: tuple[int, ...] = (0,)

    def is_first(self, stage: int) -> bool:
        return stage in self.first_stages

    def is_last(self, stage: int) -> bool:
        return stage + 1 == self.num_stages or stage + 1 in self.first_stages

    def model(self, stage: int) -> int:
        """Returns the number of the model to which a stage belongs."""
        return bisect_right(self.first_stages, stage) - 1

    def number(self, stage: int, offsets: Sequence[int]) -> int:
        """Renumbers a stage: the stages of model ``i`` are numbered from ``offsets[i]`` on."""
        model = self.model(stage)
        return offsets[model] + stage - self.first_stages[model]

    @property
    def gap_stages(self) -> range:
        """The stages of the first model."""
        return range((*self.first_stages, self.num_stages)[1])

    def rank(self, action: Action) -> int:
        rank = self.ranks[action.stage]
        if not self.shifts:
            return rank
        return (rank + self.shifts[action.stage] * action.microbatch) % self.num_ranks

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)


def ranks_of_stages(num_ranks: int, stages_per_rank: int, placement: Placement) -> tuple[int, ...]:
    """Under ``loop``, stage s lies on rank s mod p of p; ``v`` goes down the ranks and up again."""
    down, up = tuple(range(num_ranks)), tuple(reversed(range(num_ranks)))
    rounds = [up if placement == "v" and i % 2 else down for i in range(stages_per_rank)]
    return tuple(rank for ranks in rounds for rank in ranks)


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for a microbatch of average size.

    Times are those of F (forward), I (gradients of inputs, with recomputation of checkpointed blocks),
    W (gradients of weights) and B (both gradients at once). ``full_backward`` None means the sum of I
    and W, but a split can take additional time. ``activation`` is memory that F
    allocates, freed at the end of I or B. ``pending`` is memory that I allocates, freed at the end of W.
    ``recompute`` is the time within I or B in which checkpointed blocks are recomputed, which a
    rank can do while it waits for the gradient from another rank. ``shared`` is the part of
    ``activation`` that the previous stage keeps as well, if it is on the same rank.
    """

    forward: float
    input_grad: float
    weight_grad: float
    full_backward: float | None = None
    activation: float = 1.0
    pending: float = 1.0
    recompute: float = 0.0
    shared: float = 0.0

    @property
    def backward(self) -> float:
        if self.full_backward is not None:
            return self.full_backward
        return self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Costs:
    """What a schedule's actions cost, by stage.

    ``hop`` is the time to send a tensor while both ranks compute. ``sizes`` are the microbatches' times
    relative to an average microbatch. They depend on the packing of rows, and are empty if all are 1.
    """

    stages: tuple[StageCosts, ...]
    hop: float = 0.0
    sizes: tuple[float, ...] = ()

    @classmethod
    def uniform(
        cls,
        num_ranks: int,
        stages_per_rank: int,
        times: Sequence[float] = (1.0, 1.0, 1.0),
        hop: float = 0.0,
    ) -> "Costs":
        """Costs of equal stages. A rank's stages together take ``times`` for F, I and W, and hold memory 1."""
        forward, input_grad, weight_grad = (time / stages_per_rank for time in times)
        memory = 1.0 / stages_per_rank
        stage = StageCosts(forward, input_grad, weight_grad, activation=memory, pending=memory)
        return cls((stage,) * (num_ranks * stages_per_rank), hop)

    def time(self, action: Action) -> float:
        stage = self.stages[action.stage]
        times = {"F": stage.forward, "I": stage.input_grad, "W": stage.weight_grad}
        times |= {"B": stage.backward, "G": stage.forward}
        return times[action.kind] * self._size(action)

    def recompute(self, action: Action) -> float:
        """Returns how long before its gradient arrives an action can start, to recompute blocks meanwhile."""
        is_backward = action.kind in ("I", "B")
        return self.stages[action.stage].recompute * self._size(action) if is_backward else 0.0

    def _size(self, action: Action) -> float:
        has_size = self.sizes and action.kind != "G"
        return self.sizes[action.microbatch] if has_size else 1.0

    def memory(self, action: Action) -> float:
        """Returns by how much an action changes the memory held on its rank."""
        stage = self.stages[action.stage]
        return {
            "F": stage.activation,
            "I": stage.pending - stage.activation,
            "W": -stage.pending,
            "B": -stage.activation,
            "G": 0.0,
        }[action.kind]
