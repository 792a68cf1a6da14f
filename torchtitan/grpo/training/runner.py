# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Forward and backward over rows.

The trainer knows no layout: it hands rows and a loss to a runner. Tensor, context and data
parallelism lie inside the model; a runner only knows whether the model is in one piece.
Pipelines have theirs in `pipeline/stage_runner.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.grpo.data.rows import TrainRows

LossFunction = Callable[[torch.Tensor, slice], torch.Tensor]
"""From the model's output, [rows, seq, 2], for the given rows of the step to their part of
the loss, a scalar. Parts are summed over microbatches and ranks."""


class ForwardRunner(ABC):
    """Runs a model forward over the rows that its data-parallel rank was dealt."""

    has_output: bool
    """Whether this rank sees the model's output: it holds the last pipeline stage."""

    @abstractmethod
    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        """Logprobs and entropies, [rows, seq, 2] float32, without gradients.

        None on ranks without the output.
        """


class ModelRunner(ForwardRunner):
    """Runs a model that is trained."""

    @abstractmethod
    def forward_backward(self, rows: TrainRows, loss: LossFunction) -> None:
        """Adds the rows' gradients to the parameters'."""


class WholeModelRunner(ModelRunner):
    """A model in one piece.

    Args:
        model: See :class:`PackedModel`.
        rows_at_once: ``training.local_batch_size``.
        precision: Around every forward, where nothing else casts.
    """

    has_output = True

    def __init__(
        self,
        model: nn.Module,
        rows_at_once: int,
        precision: AbstractContextManager | None = None,
    ) -> None:
        self.model, self.rows_at_once = model, rows_at_once
        self.precision = precision or nullcontext()

    def forward(self, rows: TrainRows) -> torch.Tensor:
        with torch.no_grad(), self.precision:
            outputs = [
                self.model(part.tokens, **model_inputs(part))
                for part in rows.microbatches(self.rows_at_once)
            ]
        _forget_gathered(self.model)
        return torch.cat(outputs)

    def forward_backward(self, rows: TrainRows, loss: LossFunction) -> None:
        begin = 0
        for part in rows.microbatches(self.rows_at_once):
            with self.precision:
                output = self.model(part.tokens, **model_inputs(part))
                loss_part = loss(output, slice(begin, begin + part.num_rows))
            loss_part.backward()
            begin += part.num_rows


def model_inputs(rows: TrainRows) -> dict[str, torch.Tensor]:
    """What a :class:`PackedModel` needs of rows besides the tokens."""
    return {
        "sequence_ids": rows.sequence_ids,
        "positions": rows.positions,
        "labels": rows.labels,
    }


def _forget_gathered(model: nn.Module) -> None:
    """Frees gathered parameters after a forward that no backward follows.

    FSDP keeps some of them until the backward, and would take them for current after the
    next optimizer step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
