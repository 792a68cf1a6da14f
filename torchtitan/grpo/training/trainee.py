# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Defines what a step learns from, and the models that learn: the policy, and possibly a critic."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn as nn

from torchtitan.grpo.data.feed import Feed
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.losses.loss_metrics import Metric, MetricTotals, Reduction
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.lr_schedule import Schedules
from torchtitan.grpo.training.optimizers import Optimizers
from torchtitan.grpo.training.runner import ForwardJob, ModelRunner


@dataclass(frozen=True)
class ScoredRows:
    """A minibatch's rows on the training device, with advantages and other policies' logprobs.

    Attributes:
        old_logprobs: [rows, seq] float32, under the policy before the batch's first optimizer step.
            None if this is the current policy, or if this rank does not see the output.
        ref_logprobs: [rows, seq] float32, under the reference model. None without a reference model,
            or if this rank does not see the output.
        logged: Keeps the log-ratios of trainer over server before the update, and the advantages.
    """

    rows: TrainRows
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    logged: "LoggedTokens | None" = None


@dataclass(frozen=True)
class ValueTargets:
    """What the critic learns from rows. All are [rows, seq] float32, 0 except where a decision begins.

    ``old_values`` are the critic's values before the batch's first optimizer step. The weight of a
    decision is the sum of its tokens' weights in the policy's loss.
    """

    old_values: torch.Tensor
    returns: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class LoggedTokens:
    """Keeps values, on the host, for ``mask`` [rows, seq]: the tokens of `StepPlan.logged` in a minibatch."""

    mask: torch.Tensor
    _kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, which: slice, values: torch.Tensor) -> None:
        """Keeps [2, rows, seq] of the rows ``which``. It is there once the host has waited for the device."""
        if self.mask[which].any():
            self._kept[which.start] = values.detach().to("cpu", non_blocking=True)

    def values(self) -> torch.Tensor:
        """Returns [2, tokens] float32 in the order of the rows, NaN where nothing was kept."""
        found = torch.full((2, *self.mask.shape), torch.nan)
        for begin, kept in self._kept.items():
            found[:, begin : begin + kept.shape[1]] = kept
        return found[:, self.mask]


@dataclass(frozen=True)
class Minibatch:
    """Rows of one minibatch, and the forward passes that must precede its optimizer step.

    ``old`` is the pass of the policy as it is before the batch's first optimizer step, and must end
    before that step; None if the current policy is used instead. ``ref`` is None without a reference,
    and ``values``, the targets of a critic, is None without a critic.
    """

    rows: TrainRows
    old: ForwardJob | None
    ref: ForwardJob | None
    values: ValueTargets | None = None
    logged: LoggedTokens | None = None

    def scored(self) -> ScoredRows:
        """Finishes the passes ``old`` and ``ref``. Collective."""
        old, ref = (None if job is None else job.logprobs() for job in (self.old, self.ref))
        return ScoredRows(self.rows, old, ref, self.logged)


class TraineeLoss(ABC):
    """Computes the loss of one minibatch, microbatch by microbatch, and keeps the metrics.

    Pipelines may compute a loss twice to infer shapes; its metrics still count once. ``scale`` is the
    factor by which `GradientParts` multiplies this minibatch's gradient.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._metrics: dict[int, Mapping[str, Metric]] = {}

    def __call__(self, output: torch.Tensor, which: slice) -> torch.Tensor:
        """Returns the scaled loss of the rows ``which``, given the model's output for these rows."""
        loss, self._metrics[which.start] = self.compute(output, which)
        return self.scale * loss

    @abstractmethod
    def compute(
        self, output: torch.Tensor, which: slice
    ) -> tuple[torch.Tensor, Mapping[str, Metric]]:
        """Returns the loss, not multiplied by ``scale``, and its metrics."""

    def add_metrics(self, totals: MetricTotals) -> None:
        totals.add(list(self._metrics.values()), self.scale)


@dataclass
class Trainee(ABC):
    """A model that learns from each batch, and its results for the current batch.

    Attributes:
        parts: The model's stages on this rank.
        is_counted: As in `RankRole`; only ranks with the last stage of this model are counted.
        reductions: How each metric of the loss is reduced.
        first_step: The first step in which the model learns.
        learning_rate: The learning rate of the current batch.
        totals: Metrics of the batch's optimizer steps, of all ranks.
        of_update: Metrics of the current optimizer step; of this rank only, until finish_update().
        grad_norms: Gradient norm before clipping of each of the batch's optimizer steps, even if skipped.
    """

    runner: ModelRunner
    parts: list[nn.Module]
    optimizers: Optimizers
    schedulers: Schedules
    clipper: GradientClipper
    reductions: Mapping[str, Reduction]
    is_counted: bool

    norm_name = "grad_norm"
    first_step = 1

    def __post_init__(self) -> None:
        self.begin_batch()

    @abstractmethod
    def loss(self, minibatch: Minibatch, scale: float) -> TraineeLoss:
        """Returns the trainee's loss of a minibatch.

        Collective: it may first complete forward passes that the minibatch needs.
        """

    def learns(self, step: int) -> bool:
        return step >= self.first_step

    def begin_batch(self) -> None:
        self.learning_rate = float(self.schedulers.schedulers[0].get_last_lr()[0])
        self.totals, self.grad_norms = MetricTotals(self.reductions), list[float]()
        self.begin_update()

    def begin_update(self) -> None:
        """Clears the gradient and the metrics for the next optimizer step."""
        self.of_update = MetricTotals(self.reductions)
        self.optimizers.zero_grad()

    def scale_gradient(self, scale: float) -> None:
        """Scales the gradient and the losses, both summed over the parts of an optimizer step."""
        for parameter in self.clipper.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self.of_update.scale_losses(scale)

    def finish_update(self, feed: Feed, grad_norm: torch.Tensor | None) -> dict[str, float]:
        """Reduces an optimizer step's metrics over all ranks and returns them, with any ``grad_norm``.

        The host waits here until the gradient is computed.
        """
        norm = feed.all_reduce_metrics(self.of_update, grad_norm)
        self.totals.merge(self.of_update)
        self.grad_norms.append(norm)
        return self.of_update.values(1) | ({} if grad_norm is None else {self.norm_name: norm})

    def take_step(self, step: int) -> None:
        if not self.learns(step):
            return
        if step == self.first_step > 1 and len(self.grad_norms) == 1:
            # A checkpoint before it has made states that count a step, although none was taken.
            for optimizer in self.optimizers:
                optimizer.state.clear()
        self.optimizers.step()

    @property
    def num_updates(self) -> int:
        return max(len(self.grad_norms), 1)

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the batch."""
        mean_norm = sum(self.grad_norms) / self.num_updates
        return self.totals.values(self.num_updates) | {self.norm_name: mean_norm}
