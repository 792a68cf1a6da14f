# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The mean of the mismatch weights of an optimizer step (``grpo.mismatch_normalize``)."""

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.feed import Feed
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.losses.objective import weight_sums


class WeightMean:
    """Computes the mean over all microbatches and ranks, before the first of them is trained.

    Args:
        config: ``[grpo]``.
        feed: Sums values over ranks.
        is_counted: See :class:`RankRole`.
    """

    def __init__(self, config: GRPO, feed: Feed, *, is_counted: bool) -> None:
        self._config, self._feed, self._is_counted = config, feed, is_counted

    def of(self, rows: TrainRows, old_logprobs: torch.Tensor | None) -> torch.Tensor:
        """Returns the mean over the tokens that are kept, a scalar []. Collective over all ranks.

        It is 1 if no token is kept, so that weights of 0 stay 0.

        Args:
            rows: The rows of this rank in the optimizer step.
            old_logprobs: [rows, seq], under the policy before the batch's first optimizer step.
                None on ranks that do not see the output.
        """
        sums = torch.zeros(2, dtype=torch.float64)
        if old_logprobs is not None and self._is_counted:
            sums += weight_sums(
                old_logprobs,
                rows.generator_logprobs,
                rows.loss_mask,
                rows.sequence_ids,
                self._config,
            ).cpu()
        total, num_kept = self._feed.all_reduce_sum(sums).tolist()
        mean = total / num_kept if total > 0 else 1.0
        return torch.tensor(mean, device=rows.generator_logprobs.device)
