# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs forward and backward passes over rows, whatever the layout.

Tensor, context and data parallelism are inside the model. Only pipelines need another runner
(`training/stage_runner.py`). Ranks without a pipeline import neither that file nor the stages and
schedules of torch, which import the compiler.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from torchtitan.grpo.data.feed import Feed
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.models.decoder import blocks_of
from torchtitan.grpo.models.fsdp import BetweenMicrobatches, Kept
from torchtitan.grpo.models.packed_attention import HostReach
from torchtitan.grpo.models.packed_model import ScoredTokens
from torchtitan.grpo.pipeline.pass_marks import PassMarks

if TYPE_CHECKING:
    from torchtitan.grpo.pipeline.lean_stage import LeanStage

LossFunction = Callable[[torch.Tensor, slice], torch.Tensor]
"""Scalar loss of a slice of the minibatch's rows, from the output of the policy, [rows, seq, 2 + k] (k
tokens of a teacher), or of a critic, [rows, seq, 1].

Losses are summed over microbatches and ranks.
"""


class ForwardRunner(ABC):
    has_output: bool
    """True if this rank sees the output, as holder of the last pipeline stage."""

    marks: PassMarks | None = None
    """Where a run's trainees mark what their passes spend time on."""

    stages: "Sequence[LeanStage]" = ()
    """Pipeline stages that may also run forward in gaps of training passes; empty if none may."""

    @abstractmethod
    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        """Computes logprobs and entropies [rows, seq, 2], or a critic's values [rows, seq, 1], without grad.

        The result is float32, and 0 where ``rows.scored`` is False; None on ranks that do not see the output.
        """

    def mark(self, part: str) -> None:
        if self.marks is not None:
            self.marks.mark(part)

    def to_all(self, output: torch.Tensor | None, rows: TrainRows) -> torch.Tensor:
        """Sends an output, [rows, seq] float32, from the ranks that see it to all ranks that train the rows.

        Collective.
        """
        assert output is not None, "a model without stages is seen by every rank"
        return output


class ForwardJob:
    """Rows whose logprobs or values under a model are needed by a later training pass.

    A pipeline computes as many rows as fit into gaps of earlier training passes, and the rest on demand.
    """

    def __init__(self, runner: ForwardRunner, rows: TrainRows) -> None:
        self.runner = runner
        self._rows = rows
        self._num_done = 0
        self._outputs: list[torch.Tensor] = []

    @property
    def is_done(self) -> bool:
        return self._num_done == self._rows.num_rows

    @property
    def waiting(self) -> TrainRows:
        return self._rows.select(slice(self._num_done, None))

    def add(self, num_rows: int, outputs: list[torch.Tensor]) -> None:
        """Adds the next rows' outputs [rows, seq, 2]; ``outputs`` is empty on ranks that do not see them."""
        self._num_done += num_rows
        self._outputs += outputs

    def finish(self) -> None:
        """Computes the rows that are still to be done. Collective over the ranks of the model."""
        if not self.is_done:
            waiting = self.waiting
            output = self.runner.forward(waiting)
            self.add(waiting.num_rows, [] if output is None else [output])

    def logprobs(self) -> torch.Tensor | None:
        """Calls :meth:`finish` and returns [rows, seq] float32, or None on ranks that do not see the output."""
        self.finish()
        return torch.cat(self._outputs)[..., 0] if self.runner.has_output else None

    def on_all_ranks(self) -> torch.Tensor:
        """Returns logprobs, or the values of a critic, on every rank that trains the rows. Collective."""
        return self.runner.to_all(self.logprobs(), self._rows)


@dataclass(frozen=True)
class TrainJob:
    """A second model's training pass over the rows of the first model, with a loss of its own."""

    runner: "ModelRunner"
    loss: LossFunction


class ModelRunner(ForwardRunner):
    @abstractmethod
    def forward_backward(
        self,
        rows: TrainRows,
        loss: LossFunction,
        waiting: Sequence[ForwardJob] = (),
        beside: TrainJob | None = None,
    ) -> None:
        """Adds the gradients of the rows' loss to the parameters' ``grad``, and runs the job ``beside``.

        Pipelines train both models in one pass, and run ``waiting`` passes of other rows in idle
        time, the most urgent ones first.
        """

    def mark_in(self, marks: PassMarks) -> None:
        self.marks = marks

    def begin_step(self, step: int) -> None:
        """Called before the passes of a step."""

    def end_step(self, feed: Feed) -> None:
        """Called after a step's passes and updates; collective over all ranks."""

    def take_metrics(self) -> dict[str, float]:
        """Returns a pipeline's metrics since the last call."""
        return {}

    def close(self) -> None:
        """Called when the training has ended."""


class WholeModelRunner(ModelRunner):
    """Runs a model without pipeline stages. ``kept`` is the resolved ``fsdp_between_microbatches``."""

    has_output = True

    def __init__(self, model: nn.Module, rows_at_once: int, kept: Kept = "free") -> None:
        self.model, self.rows_at_once = model, rows_at_once
        self._between = BetweenMicrobatches(model, kept)

    def mark_in(self, marks: PassMarks) -> None:
        super().mark_in(marks)
        marks.watch(blocks_of(self.model))

    def forward(self, rows: TrainRows) -> torch.Tensor:
        self.mark("forward")
        with torch.no_grad():
            outputs = [
                self.model(part.tokens, **model_inputs(part))
                for part in rows.microbatches(self.rows_at_once)
            ]
        self._between.forget_parameters()
        self.mark("")
        return torch.cat(outputs)

    def forward_backward(
        self,
        rows: TrainRows,
        loss: LossFunction,
        waiting: Sequence[ForwardJob] = (),
        beside: TrainJob | None = None,
    ) -> None:
        begin = 0
        for part in rows.microbatches(self.rows_at_once):
            self.mark("forward")
            end = begin + part.num_rows
            # Ranks are compared by their work in the first microbatch.
            marks = self.marks if begin == 0 else None
            with nullcontext() if marks is None else marks.watching():
                output = self.model(part.tokens, **model_inputs(part, trains=True))
            with nullcontext() if marks is None else marks.own(""):
                part_loss = loss(output, slice(begin, end))
            self._between.before_backward(is_last=end == rows.num_rows)
            self.mark("backward")
            part_loss.backward()
            begin = end
        self._between.forget_parameters()
        self.mark("")
        if beside is not None:
            beside.runner.forward_backward(rows, beside.loss)


def model_inputs(rows: TrainRows, *, trains: bool = False) -> dict[str, Any]:
    """Returns a :class:`PackedModel`'s inputs besides tokens, with any teacher's tokens if it ``trains``."""
    has_top = trains and "teacher_top_ids" in rows.columns
    top = {"other_ids": rows.columns["teacher_top_ids"]} if has_top else {}
    return top | {
        "scored": ScoredTokens(rows.scored, rows.host_mask),
        "reach": rows.reach,
        "host_reach": HostReach(rows.host_reach),
        "positions": rows.positions,
        "labels": rows.labels,
    }
