# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The gradient of a step whose rollouts come in parts (``rollout.stream``)."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from torchtitan.grpo.data.feed import TrainBatch
from torchtitan.grpo.losses.objective import SUM_NAMES, scale_losses


class GradientParts:
    """What has been added up of one optimizer step.

    The weights of a part's tokens are over that part alone. The step's own gradient is the
    parts', each weighed by its share of the total mass (`losses/aggregation.py`)::

        gradient = sum over parts of  mass / total mass * gradient of the part

    The total is known with the last part only. So each is added as many times as its mass is
    the first one's, which keeps gradients in the range that they have anyway, and
    :meth:`finish` divides by the total.

    Attributes:
        sums: [len(SUM_NAMES)] float64, of this rank.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64)
        self._parts: list[TrainBatch] = []
        self._unit = self._mass = 0

    @property
    def is_empty(self) -> bool:
        """Nothing was there to learn from."""
        return self._mass == 0

    def share_of(self, part: TrainBatch) -> float:
        """Takes a part in; returns what its loss is to be multiplied by. 0: leave it out."""
        self._parts.append(part)
        self._mass += part.mass
        self._unit = self._unit or part.mass
        return part.mass / self._unit if part.mass else 0.0

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes the gradients and the sums those of the whole step."""
        scale = self._unit / self._mass
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self.sums = scale_losses(self.sums, scale)

    def whole(self) -> TrainBatch:
        """The last part, with the counts of all of them."""
        return replace(
            self._parts[-1],
            num_tokens=sum(part.num_tokens for part in self._parts),
            num_trained_tokens=sum(part.num_trained_tokens for part in self._parts),
        )
