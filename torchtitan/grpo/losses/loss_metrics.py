# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Metrics of the loss, each with the rule that combines its values over microbatches and ranks.

The numbers of a microbatch stay on the device until the minibatch is done; :class:`MetricTotals`
then combines them over microbatches, optimizer steps, parts of a batch and ranks. The rules::

    reduction        numbers                  value of the metric
    sum              total                    sum over the batch
    mean             total, count             sum of totals / sum of counts
    max, min         extreme                  largest or smallest of the batch
    loss             loss                     sum over an optimizer step, averaged over the steps
    effective_size   sum w, sum w^2, count    (sum w)^2 / (count * sum w^2)

Without a trained token in the batch every metric is 0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch

TokenReduction = Literal["sum", "mean", "max", "min"]
Reduction = Literal["sum", "mean", "max", "min", "loss", "effective_size"]

_NUM_ADDED: dict[Reduction, int] = {"sum": 1, "mean": 2, "loss": 1, "effective_size": 3}
"""Numbers that are added up, for each reduction that adds."""


class TokenMetric(NamedTuple):
    """Values [rows, seq], float or bool, with the ``reduction`` that combines them over trained tokens."""

    values: torch.Tensor
    reduction: TokenReduction


class Metric(NamedTuple):
    """A metric's reduction and the detached scalars that the module's table lists for this reduction."""

    reduction: Reduction
    numbers: tuple[torch.Tensor, ...]


def loss_metric(value: torch.Tensor) -> Metric:
    return Metric("loss", (value.detach(),))


def mean_metric(total: torch.Tensor, count: torch.Tensor) -> Metric:
    return Metric("mean", (total.detach(), count))


def token_metric(metric: TokenMetric, loss_mask: torch.Tensor) -> Metric:
    """Reduces, in float64, the values at tokens where ``loss_mask`` [rows, seq] is True."""
    values, reduction = metric.values.detach().double(), metric.reduction
    match reduction:
        case "sum":
            return Metric(reduction, (torch.where(loss_mask, values, 0.0).sum(),))
        case "mean":
            total = torch.where(loss_mask, values, 0.0).sum()
            return Metric(reduction, (total, loss_mask.sum()))
        case "max":
            return Metric(reduction, (torch.where(loss_mask, values, -math.inf).max(),))
        case "min":
            return Metric(reduction, (torch.where(loss_mask, values, math.inf).min(),))


def check_token_metric(name: str, metric: object, shape: torch.Size) -> None:
    if not isinstance(metric, TokenMetric):
        raise ValueError(
            f"Metric {name!r} must be a TokenMetric(values, reduction), got a "
            f"{type(metric).__name__}."
        )
    if metric.reduction not in get_args(TokenReduction):
        raise ValueError(
            f"The reduction of metric {name!r} must be sum, mean, max or min, got "
            f"{metric.reduction!r}."
        )
    if not isinstance(metric.values, torch.Tensor) or metric.values.shape != shape:
        got = getattr(metric.values, "shape", type(metric.values).__name__)
        raise ValueError(
            f"The values of metric {name!r} must be a tensor {list(shape)}, one value a token, "
            f"got {list(got) if isinstance(got, torch.Size) else got}."
        )


class MetricTotals:
    """Metrics of one batch, combined so far. Every rank has the same names.

    After :meth:`fetch`, ``added``, float64 on the CPU, holds numbers to be summed over ranks, and
    ``largest`` holds maxima and negated minima; -inf stands for no value.
    """

    def __init__(self, reductions: Mapping[str, Reduction]) -> None:
        self._reductions = dict(reductions)
        self._adding = [name for name, r in reductions.items() if r in _NUM_ADDED]
        self._extremes = [name for name, r in reductions.items() if r not in _NUM_ADDED]
        owners = [name for name in self._adding for _ in range(_NUM_ADDED[reductions[name]])]
        self._is_loss = torch.tensor([reductions[name] == "loss" for name in owners]).bool()
        self.added = torch.zeros(len(owners), dtype=torch.float64)
        self.largest = torch.full((len(self._extremes),), -math.inf, dtype=torch.float64)
        self._on_device: list[tuple[torch.Tensor, float]] = []  # numbers, and the scale of losses

    def add(self, microbatches: Sequence[Mapping[str, Metric]], scale: float = 1.0) -> None:
        """Adds a minibatch's metrics. Multiplies those with the reduction ``loss`` by ``scale``."""
        if not microbatches:
            return
        for metrics in microbatches:
            self._check(metrics)
        numbers = torch.stack([self._numbers(metrics) for metrics in microbatches])
        added, extremes = numbers.tensor_split([len(self.added)], dim=1)
        self._on_device.append((torch.cat([added.sum(0), extremes.amax(0)]), scale))

    def fetch(self, beside: torch.Tensor | None = None) -> float:
        """Moves the added metrics, and the scalar ``beside``, to the CPU in one copy. Returns ``beside``."""
        numbers = [combined for combined, _ in self._on_device]
        if beside is not None:
            numbers.append(beside.detach().reshape(1).double())
        if not numbers:
            return 0.0
        moved = torch.cat(numbers).cpu()
        scales, self._on_device = [scale for _, scale in self._on_device], []
        size = len(self.added) + len(self.largest)
        for index, scale in enumerate(scales):
            # Scaled on the CPU: indexing with a mask on a device would wait for the device.
            combined = moved[index * size : (index + 1) * size]
            self.added += combined[: len(self.added)] * self._factors(scale)
            self.largest = torch.maximum(self.largest, combined[len(self.added) :])
        return float(moved[-1]) if beside is not None else 0.0

    def merge(self, other: "MetricTotals") -> None:
        self.fetch()
        other.fetch()
        self.added += other.added
        self.largest = torch.maximum(self.largest, other.largest)

    def scale_losses(self, scale: float) -> None:
        self.added *= self._factors(scale)
        self._on_device = [(combined, own * scale) for combined, own in self._on_device]

    def values(self, num_optimizer_steps: int) -> dict[str, float]:
        self.fetch()
        added, largest = iter(self.added.tolist()), iter(self.largest.tolist())
        found = {}
        for name in self._adding:
            reduction = self._reductions[name]
            numbers = [next(added) for _ in range(_NUM_ADDED[reduction])]
            found[name] = _added_value(reduction, numbers, num_optimizer_steps)
        for name in self._extremes:
            extreme = next(largest)
            found[name] = 0.0 if extreme == -math.inf else self._sign(name) * extreme
        return {name: found[name] for name in self._reductions}

    def _numbers(self, metrics: Mapping[str, Metric]) -> torch.Tensor:
        added = [number.double() for name in self._adding for number in metrics[name].numbers]
        extremes = [self._sign(n) * metrics[n].numbers[0].double() for n in self._extremes]
        return torch.stack([*added, *extremes])

    def _sign(self, name: str) -> int:
        return -1 if self._reductions[name] == "min" else 1

    def _factors(self, scale: float) -> torch.Tensor:
        return torch.ones_like(self.added).masked_fill(self._is_loss, scale)

    def _check(self, metrics: Mapping[str, Metric]) -> None:
        got = {name: metric.reduction for name, metric in metrics.items()}
        if got != self._reductions:
            changed = sorted(name for name, _ in (got.items() ^ self._reductions.items()))
            raise ValueError(
                "A loss must return the same metrics with the same reductions in each call, but "
                "these metrics are new, are missing or have another reduction than in the first "
                f"call: {', '.join(dict.fromkeys(changed))}."
            )


def _added_value(reduction: Reduction, numbers: list[float], num_optimizer_steps: int) -> float:
    match reduction:
        case "loss":
            return numbers[0] / num_optimizer_steps
        case "mean":
            return numbers[0] / max(numbers[1], 1.0)
        case "effective_size":
            weight, weight_squared, count = numbers
            return weight**2 / max(max(count, 1.0) * weight_squared, 1e-300)
        case _:
            return numbers[0]
