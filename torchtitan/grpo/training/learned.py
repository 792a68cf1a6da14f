# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the optimizer steps of one batch leave behind."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan.grpo.data.feed import TrainBatch
from torchtitan.grpo.losses.objective import metrics_from_sums


@dataclass(frozen=True)
class Learned:
    """Result of the optimizer steps of one batch, on one rank.

    Attributes:
        batch: The batch. If it came in parts, the last part with the counts of all of them.
        sums: [len(SUM_NAMES)] float64, what this rank adds to the sums over all ranks.
        grad_norms: Global gradient norm before clipping, for each optimizer step.
    """

    batch: TrainBatch
    sums: torch.Tensor
    grad_norms: list[float]

    def metrics(self, totals: Sequence[float], step_seconds: float) -> dict[str, float]:
        """Returns the metrics of the batch.

        Args:
            totals: ``sums`` added over all ranks.
            step_seconds: Duration of the whole step.
        """
        num_updates = max(len(self.grad_norms), 1)
        return metrics_from_sums(totals, num_updates) | {
            "grad_norm": sum(self.grad_norms) / num_updates,
            "data/trained_tokens": float(self.batch.num_trained_tokens),
            "time/tokens_per_second": self.batch.num_tokens / step_seconds,
        }
