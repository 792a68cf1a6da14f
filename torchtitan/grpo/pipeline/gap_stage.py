# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Pipeline stages that run forward passes of other rows in the gaps of a training pass."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.lowering import GapNumbers


class GapStage(LeanStage):
    """A stage of a model that runs forward passes inside the training pass of another model.

    The runtime identifies stages by their numbers and treats stages with successive numbers as
    neighbors. The stages of each further model therefore have numbers of their own, and one number
    between two models is left unused.

    Args:
        stage: The stage whose module runs forward passes. It must have run in a schedule of its own.
        offset: Number that is added to the stage's number.
        trained: The trained stage with the same module; None if no trained stage has this module.
    """

    def __init__(self, stage: LeanStage, offset: int, trained: LeanStage | None) -> None:
        self._is_first, self._is_last = stage.is_first, stage.is_last
        super().__init__(
            stage.submod,
            stage.stage_index + offset,
            stage.num_stages + offset,
            stage.device,
            group=stage.group,
        )
        self.surrounding = stage.surrounding
        self.receive_like(stage, offset)
        self.act_send_info = {
            output: [receiver + offset for receiver in receivers]
            for output, receivers in stage.act_send_info.items()
        }
        self.trained = trained
        self.outputs: dict[int, torch.Tensor] = {}

    @property
    def is_first(self) -> bool:
        """Whether the stage holds the first layers of its model."""
        return self._is_first

    @property
    def is_last(self) -> bool:
        """Whether the stage holds the last layers of its model."""
        return self._is_last

    @torch.no_grad()
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:
            self.outputs[fwd_chunk_id] = output
        return output


@dataclass(frozen=True)
class GapModel:
    """This rank's stages of a model that runs forward passes in gaps.

    Attributes:
        stages: The stages.
        numbers: The stage numbers that the runtime uses for them.
    """

    stages: list[GapStage]
    numbers: GapNumbers

    @classmethod
    def beside(cls, trained: list[LeanStage], stages: list[LeanStage], number: int) -> "GapModel":
        """Makes the stages of one further model.

        Args:
            trained: This rank's trained stages.
            stages: This rank's stages of a model with the same placement. They must have run forward
                passes before.
            number: Number of earlier models, including the trained model.
        """
        is_trained = stages[0].submod is trained[0].submod
        numbers = GapNumbers(number * (stages[0].num_stages + 1), is_trained)
        holders = trained if numbers.shares_weights else [None] * len(stages)
        return cls(
            [
                GapStage(stage, numbers.offset, holder)
                for stage, holder in zip(stages, holders, strict=True)
            ],
            numbers,
        )

    def take_outputs(self, microbatches: Iterable[int]) -> list[torch.Tensor]:
        """Returns and removes the outputs of these microbatches.

        The result is empty on ranks that do not hold the last stage.
        """
        last = next((stage for stage in self.stages if stage.is_last), None)
        return [] if last is None else [last.outputs.pop(number) for number in microbatches]


@dataclass
class GapRows:
    """Microbatches that a training pass may run through a model in its gaps.

    Attributes:
        model: The model.
        inputs: For each microbatch, the arguments of the first stage. They are empty on ranks that do
            not hold the first stage.
        named_inputs: For each microbatch, further keyword arguments of every stage.
        num_done: Number of microbatches that the pass has run, counted from the first one.
        outputs: The outputs of these microbatches, on the rank of the last stage.
    """

    model: GapModel
    inputs: list[tuple[Any, ...]]
    named_inputs: list[dict[str, Any]]
    num_done: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)
