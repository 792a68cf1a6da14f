# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the actions of a pipeline cost in time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchtitan.grpo.pipeline.tables.actions import Action


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage and a microbatch of average size.

    Attributes:
        forward: Time of F.
        input_grad: Time of I, in which checkpointed blocks are recomputed.
        weight_grad: Time of W.
        full_backward: Time of B, or None for that of I and W together. Splitting a backward pass
            can cost time.
        activation: Memory that F leaves and that I, or B, gives back when it ends.
        pending: Memory that I leaves and that W gives back when it ends.
        recompute: Part of I, or B, that computes checkpointed blocks again and needs no gradient. A
            rank that waits for the gradient from another rank computes it meanwhile.
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
        stages: One for each stage.
        hop: Time for which a tensor travels from one rank to another. Both go on meanwhile.
        sizes: For each microbatch, its time relative to an average one; all 1 if it is empty.
            Rows of equal length differ because attention's cost depends on how they are packed.
            Their memory does not.
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
        """Equal stages. A rank's stages together take ``times`` for F, I and W, and memory 1."""
        forward, input_grad, weight_grad = (time / stages_per_rank for time in times)
        memory = 1.0 / stages_per_rank
        stage = StageCosts(forward, input_grad, weight_grad, activation=memory, pending=memory)
        return cls((stage,) * (num_ranks * stages_per_rank), hop)

    def with_unit_memory(self) -> "Costs":
        """Returns the same times, with memory counted in microbatches of one stage."""
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
        """Returns for how long an action needs no gradient, and so can run before it is there."""
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
