# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Collects the results of the optimizer steps of one batch, and computes their metrics."""

from dataclasses import dataclass

from torchtitan.grpo.data.feed import TrainBatch
from torchtitan.grpo.losses.loss_metrics import MetricTotals
from torchtitan.grpo.losses.objective import batch_loss_metrics


@dataclass(frozen=True)
class Learned:
    """Result of the optimizer steps of one batch, on one rank.

    Attributes:
        batch: The batch. If it came in parts, this is the last part, with the counts of all of them.
        totals: Metrics of the loss, combined over all ranks.
        grad_norms: Global gradient norm before clipping, for each optimizer step.
    """

    batch: TrainBatch
    totals: MetricTotals
    grad_norms: list[float]

    def add(self, totals: MetricTotals, grad_norm: float) -> None:
        """Adds an optimizer step, whether it was taken or skipped.

        Args:
            totals: Its metrics, combined over all ranks.
            grad_norm: Its gradient norm before clipping.
        """
        self.totals.merge(totals)
        self.grad_norms.append(grad_norm)

    def metrics(self, step_seconds: float) -> dict[str, float]:
        """Returns the metrics of the batch.

        Args:
            step_seconds: Duration of the whole step.
        """
        num_updates = max(len(self.grad_norms), 1)
        return batch_loss_metrics(self.totals, num_updates) | {
            "grad_norm": sum(self.grad_norms) / num_updates,
            "data/trained_tokens": float(self.batch.num_trained_tokens),
            "time/tokens_per_second": self.batch.num_tokens / step_seconds,
            "time/trained_tokens_per_second": self.batch.num_trained_tokens / step_seconds,
        }
