# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Costs, in time and memory, of the actions of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchtitan.grpo.pipeline.tables.actions import Action


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for a microbatch of average size.

    Attributes:
        forward: Time of F.
        input_grad: Time of I, in which checkpointed blocks are recomputed.
        weight_grad: Time of W.
        full_backward: Time of B. None means the sum of the times of I and W. Splitting a backward
            pass can take additional time.
        activation: Memory that F allocates and that is freed at the end of I or B.
        pending: Memory that I allocates and that is freed at the end of W.
        recompute: Time within I or B in which checkpointed blocks are recomputed. Recomputation
            needs no gradient, so a rank does it while it waits for the gradient from another rank.
    """

    forward: float
    input_grad: float
    weight_grad: float
    full_backward: float | None = None
    activation: float = 1.0
    pending: float = 1.0
    recompute: float = 0.0

    @property
    def backward(self) -> float:
        """Time of B."""
        if self.full_backward is not None:
            return self.full_backward
        return self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Costs:
    """Costs of all stages and microbatches.

    Attributes:
        stages: Costs of each stage.
        hop: Time to send a tensor from one rank to another. Both ranks compute meanwhile.
        sizes: For each microbatch, its time relative to an average one. If the tuple is empty, all
            are 1. Rows of equal length take different times, because the cost of attention depends
            on how they are packed. Their memory is equal.
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
        """Returns the costs of equal stages.

        The stages of a rank together take ``times`` for F, I and W, and hold memory 1.
        """
        forward, input_grad, weight_grad = (time / stages_per_rank for time in times)
        memory = 1.0 / stages_per_rank
        stage = StageCosts(forward, input_grad, weight_grad, activation=memory, pending=memory)
        return cls((stage,) * (num_ranks * stages_per_rank), hop)

    def with_unit_memory(self) -> "Costs":
        """Returns the same times with memory counted in microbatches of one stage."""
        stages = (replace(stage, activation=1.0, pending=1.0) for stage in self.stages)
        return replace(self, stages=tuple(stages))

    def time(self, action: Action) -> float:
        """Returns how long an action takes."""
        stage = self.stages[action.stage]
        time = {
            "F": stage.forward,
            "I": stage.input_grad,
            "W": stage.weight_grad,
            "B": stage.backward,
            "G": stage.forward,
        }[action.kind]
        return time * self._size(action)

    def recompute(self, action: Action) -> float:
        """Returns the maximum time by which an action can begin before its gradient arrives."""
        is_backward = action.kind in ("I", "B")
        return self.stages[action.stage].recompute * self._size(action) if is_backward else 0.0

    def _size(self, action: Action) -> float:
        has_size = self.sizes and action.kind != "G"
        return self.sizes[action.microbatch] if has_size else 1.0

    def memory(self, action: Action) -> float:
        """Returns the change that an action makes to the memory held on its rank."""
        stage = self.stages[action.stage]
        return {
            "F": stage.activation,
            "I": stage.pending - stage.activation,
            "W": -stage.pending,
            "B": -stage.activation,
            "G": 0.0,
        }[action.kind]
