# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The supervised loss: the negative log-likelihood of given tokens."""

import torch


def negative_log_likelihood(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of ``-logprob``, a scalar [].

    With the weight ``1 / n`` at each of ``n`` tokens of a batch, the sum over all microbatches and
    ranks is the batch's mean cross entropy.

    Args:
        logprobs: [rows, seq] float, of the labels. May hold anything, NaN included, where the weight
            is 0.
        weights: [rows, seq] float, at least 0.
    """
    counts = weights > 0
    # Before the product, because 0 * NaN is NaN, in the loss and in its gradient.
    return -(torch.where(counts, weights, 0.0) * torch.where(counts, logprobs, 0.0)).sum()
