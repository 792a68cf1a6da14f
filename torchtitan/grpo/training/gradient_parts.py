# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The gradient of a step whose rollouts arrive in parts (``rollout.stream``)."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from torchtitan.grpo.data.feed import TrainBatch
from torchtitan.grpo.losses.loss_metrics import MetricTotals


class GradientParts:
    """Adds the gradients of parts up to the gradient of one optimizer step.

    The loss weights of a part's tokens are normalized over that part alone. The gradient of
    the step is the mean over its parts, weighted by mass (`losses/aggregation.py`)::

        gradient = sum over parts of  mass / total mass * gradient of the part

    The total mass is known only once the last part has arrived. Until then each part is scaled
    by the ratio of its mass to that of the first part, which keeps the gradients in their usual
    range; :meth:`finish` then divides by the total.

    Args:
        totals: Metrics of this rank; those of the parts are added to it.
    """

    def __init__(self, totals: MetricTotals) -> None:
        self.totals = totals
        self._parts: list[TrainBatch] = []
        self._unit = self._mass = 0

    @property
    def is_empty(self) -> bool:
        """Whether no part had anything to learn from."""
        return self._mass == 0

    def scale_of(self, part: TrainBatch) -> float:
        """Registers a part and returns the factor of its loss; 0 if it is to be left out."""
        self._parts.append(part)
        self._mass += part.mass
        self._unit = self._unit or part.mass
        return part.mass / self._unit if part.mass else 0.0

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """Turns the accumulated gradients and sums into those of the whole step, in place."""
        if self.is_empty:
            return
        scale = self._unit / self._mass
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self.totals.scale_losses(scale)

    @property
    def are_rewards_equal(self) -> bool:
        """Whether no group of any part has two different rewards."""
        return all(part.samples.are_rewards_equal for part in self._parts)

    def whole(self) -> TrainBatch:
        """Returns the last part, with the counts of all parts."""
        return replace(
            self._parts[-1],
            num_tokens=sum(part.num_tokens for part in self._parts),
            num_trained_tokens=sum(part.num_trained_tokens for part in self._parts),
        )
