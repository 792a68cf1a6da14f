# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Kullback-Leibler divergence estimates from logprobs of sampled tokens."""

import math
from typing import Literal

import torch

from torchtitan.grpo.losses.sequences import LOG_RATIO_BOUND, held_between

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: torch.Tensor, other_logprobs: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """Returns an estimate of ``KL(policy || other)`` at each token that the policy drew.

    With ``d = other - policy`` (http://joschu.net/blog/kl-approx.html)::

        k1   -d               unbiased; as a loss its expected gradient is 0
        k2   d^2 / 2          biased; as a loss its gradient is that of the KL
        k3   exp(d) - 1 - d   unbiased, never negative; as a loss biased

    Where ``d`` is above :data:`LOG_RATIO_BOUND`, ``k3`` is replaced by its tangent at the bound. Thus it
    stays finite, and as a loss it keeps pulling the policy towards ``other`` with the slope
    ``exp(LOG_RATIO_BOUND) - 1``, however far away the policy is. NaN inputs give NaN, so the caller must
    mask them first.

    Both logprobs are of the same tokens, [...] float, as is the result.
    """
    difference = other_logprobs - logprobs
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            # expm1 keeps the digits that exp(d) - 1 loses where the two nearly agree. At the bound
            # itself, the held exponential has the slope, and relu has none.
            bounded = torch.expm1(held_between(difference, high=LOG_RATIO_BOUND))
            beyond = math.exp(LOG_RATIO_BOUND) * torch.relu(difference - LOG_RATIO_BOUND)
            return bounded + beyond - difference


def sample_kl_sums(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    sample_ids: torch.Tensor,
    *,
    num_samples: int,
    estimator: KLEstimator,
) -> torch.Tensor:
    """Sums :func:`kl_estimate` over the trained tokens of each sample, for its reward.

    The inputs are [rows, seq]; untrained tokens may hold anything. Returns [num_samples] float64,
    detached, with 0 for samples without a token in these rows, so that microbatches and ranks can be added.
    """
    kl = kl_estimate(
        torch.where(loss_mask, logprobs.detach(), 0.0),
        torch.where(loss_mask, ref_logprobs.detach(), 0.0),
        estimator,
    )
    # Untrained tokens are added to one more entry at the end, which is cut off.
    index = torch.where(loss_mask, sample_ids, num_samples).flatten()
    sums = torch.zeros(num_samples + 1, dtype=torch.float64, device=kl.device)
    return sums.index_add(0, index, kl.flatten().double())[:num_samples]
