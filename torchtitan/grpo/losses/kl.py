# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Kullback-Leibler divergence estimates from logprobs of sampled tokens."""

import torch


def k3_kl(
    sampling_logprobs: torch.Tensor, other_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Sum over masked tokens of the k3 estimate of ``KL(sampling || other)``.

    ``k3 = exp(d) - 1 - d`` with ``d = other - sampling``: unbiased where the tokens were
    drawn from the first policy, and never negative
    (http://joschu.net/blog/kl-approx.html). Values in masked places may be anything.

    Args:
        sampling_logprobs: [rows, seq] float, of the policy that the tokens come from.
        other_logprobs: [rows, seq] float.
        loss_mask: [rows, seq] bool.

    Returns:
        Scalar [].
    """
    difference = torch.where(loss_mask, other_logprobs - sampling_logprobs, 0.0)
    # expm1 keeps the digits that exp(d) - 1 loses where the two policies nearly agree.
    return (torch.expm1(difference) - difference).sum()
