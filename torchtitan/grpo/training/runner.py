# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs forward and backward passes over rows.

The trainer does not depend on the layout: it passes rows and a loss to a runner. Tensor, context
and data parallelism are inside the model. Only pipelines need another runner, which is in
`training/stage_runner.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.models.packed_attention import HostSequences
from torchtitan.grpo.models.packed_model import ScoredTokens
from torchtitan.grpo.models.parallelize import BetweenMicrobatches, Kept
from torchtitan.grpo.pipeline.lean_stage import LeanStage

LossFunction = Callable[[torch.Tensor, slice], torch.Tensor]
"""Computes the loss of some rows, a scalar, from the model's output for them, [rows, seq, 2 + k].

The slice tells which rows of the minibatch they are. Losses are summed over microbatches and
ranks."""


class ForwardRunner(ABC):
    """Runs a model forward over the rows of this data-parallel rank."""

    has_output: bool
    """Whether this rank sees the model's output, since it holds the last pipeline stage."""

    stages: Sequence[LeanStage] = ()
    """Pipeline stages of this rank that run forward, which may also run in the gaps of training
    passes. Empty without a pipeline."""

    @abstractmethod
    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        """Returns logprobs and entropies, [rows, seq, 2] float32, without gradients.

        They are 0 where ``rows.scored`` is False. None on ranks that do not see the output.
        """


class ForwardJob:
    """Rows whose logprobs under a model are needed by a later training pass.

    A pipeline runs as many of the rows as fit into the gaps of earlier training passes, from the
    first one on. The rest is computed when the logprobs are asked for.
    """

    def __init__(self, runner: ForwardRunner, rows: TrainRows) -> None:
        self.runner = runner
        self._rows = rows
        self._num_done = 0
        self._outputs: list[torch.Tensor] = []

    @property
    def is_done(self) -> bool:
        """Whether no row waits."""
        return self._num_done == self._rows.num_rows

    @property
    def waiting(self) -> TrainRows:
        """The rows that have not been computed."""
        return self._rows.select(slice(self._num_done, None))

    def add(self, num_rows: int, outputs: list[torch.Tensor]) -> None:
        """Adds the [rows, seq, 2] outputs of further rows; they are empty if this rank does not see them."""
        self._num_done += num_rows
        self._outputs += outputs

    def finish(self) -> None:
        """Computes the rows that wait. Collective over the ranks of the model."""
        if not self.is_done:
            waiting = self.waiting
            output = self.runner.forward(waiting)
            self.add(waiting.num_rows, [] if output is None else [output])

    def logprobs(self) -> torch.Tensor | None:
        """Returns [rows, seq] float32; None on ranks that do not see the output.

        Computes the rows that wait. Collective over the ranks of the model.
        """
        self.finish()
        return torch.cat(self._outputs)[..., 0] if self.runner.has_output else None


class ModelRunner(ForwardRunner):
    """Runs the model that is trained."""

    @abstractmethod
    def forward_backward(
        self, rows: TrainRows, loss: LossFunction, waiting: Sequence[ForwardJob] = ()
    ) -> None:
        """Adds the gradients of the rows' loss to the gradients of the parameters.

        Args:
            waiting: Forward passes of other rows that may run in idle time, the most urgent ones
                first. Only a pipeline has such time.
        """

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics of the passes since the last call. Only a pipeline has any."""
        return {}


class WholeModelRunner(ModelRunner):
    """Runs a model that is not divided into pipeline stages.

    Args:
        kept: ``parallelism.fsdp_between_microbatches``, resolved.
    """

    has_output = True

    def __init__(self, model: nn.Module, rows_at_once: int, kept: Kept = "free") -> None:
        self.model, self.rows_at_once = model, rows_at_once
        self._between = BetweenMicrobatches(model, kept)

    def forward(self, rows: TrainRows) -> torch.Tensor:
        with torch.no_grad():
            outputs = [
                self.model(part.tokens, **model_inputs(part))
                for part in rows.microbatches(self.rows_at_once)
            ]
        self._between.forget_parameters()
        return torch.cat(outputs)

    def forward_backward(
        self, rows: TrainRows, loss: LossFunction, waiting: Sequence[ForwardJob] = ()
    ) -> None:
        begin = 0
        for part in rows.microbatches(self.rows_at_once):
            output = self.model(part.tokens, **model_inputs(part, trains=True))
            end = begin + part.num_rows
            part_loss = loss(output, slice(begin, end))
            self._between.before_backward(is_last=end == rows.num_rows)
            part_loss.backward()
            begin = end
        self._between.forget_parameters()


def model_inputs(rows: TrainRows, *, trains: bool = False) -> dict[str, Any]:
    """Returns the inputs of a :class:`PackedModel` besides the tokens.

    Args:
        trains: Whether a loss follows. Only then are the logprobs of a teacher's tokens of use.
    """
    has_top = trains and "teacher_top_ids" in rows.columns
    top = {"other_ids": rows.columns["teacher_top_ids"]} if has_top else {}
    return top | {
        "scored": ScoredTokens(rows.scored, rows.host_mask),
        "sequence_ids": rows.sequence_ids,
        "host_sequences": HostSequences(rows.host_sequence_ids),
        "positions": rows.positions,
        "labels": rows.labels,
    }
