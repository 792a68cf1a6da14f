# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds whole sequences that are too far from the policy that sampled them to learn from.

It works under any correction of single tokens, so that weights may be truncated and the worst
sequences rejected at the same time. All inputs are detached, and 0 where nothing is trained.
"""

from dataclasses import dataclass

import torch

from torchtitan.grpo.losses.kl import kl_estimate
from torchtitan.grpo.losses.sequences import ratio, sequence_maxima, sequence_means


@dataclass(frozen=True)
class RejectionBounds:
    """Largest values with which a sequence is kept (``grpo.mismatch_max_...``); 0 turns a bound off."""

    k1: float = 0.0
    k3: float = 0.0
    tv: float = 0.0
    ratio: float = 0.0


def rejected_sequences(
    trainer_logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    bounds: RejectionBounds,
) -> torch.Tensor:
    """Returns the trained tokens of sequences that exceed at least one of the bounds.

    With ``r = trainer / generator`` of a token, and means over the trained tokens of a sequence::

        k1      |mean(-log r)|            of KL(generator || trainer)
        k3      mean(r - 1 - log r)       of KL(generator || trainer)
        tv      mean(|r - 1|) / 2         of the total variation distance
        ratio   max(r, 1 / r)             the largest of any token

    The first three estimate the divergence in the second column over the sequence. Rejection by
    divergences is from https://richardli.xyz/rl-collapse, and by the largest token from Trust
    Region Masking (https://arxiv.org/abs/2512.23075).

    Example: ratios 4 and 1/2 give ``k1 = |log 2| / 2``, ``k3 = (2.5 - log 2) / 2``, ``tv = 0.875``
    and ``ratio = 4``.

    All tensors are [rows, seq], the logprobs float and 0 where not trained, the result bool.
    """
    log_ratio = trainer_logprobs - generator_logprobs
    rejected = torch.zeros_like(loss_mask)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return sequence_means(values, loss_mask, sequence_ids)

    if bounds.k1 > 0:
        rejected = rejected | (mean(log_ratio).abs() > bounds.k1)
    if bounds.k3 > 0:
        k3 = kl_estimate(generator_logprobs, trainer_logprobs, "k3")
        rejected = rejected | (mean(k3) > bounds.k3)
    if bounds.tv > 0:
        distance = torch.where(loss_mask, (ratio(log_ratio) - 1).abs() / 2, 0.0)
        rejected = rejected | (mean(distance) > bounds.tv)
    if bounds.ratio > 0:
        largest = sequence_maxima(log_ratio.abs(), sequence_ids)
        rejected = rejected | (ratio(largest) > bounds.ratio)
    return loss_mask & rejected


def off_policy_sequences(
    logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """Returns the trained tokens of bad sequences that the policy hardly writes any more.

    Off-policy sequence masking of DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): a sequence is
    found if its advantage is negative and ``mean(log generator - log policy) > threshold`` over its
    trained tokens. The policy is the current one, so later optimizer steps of a batch find more
    sequences.

    All tensors are [rows, seq], the logprobs detached and 0 where not trained, advantages constant
    within a sequence, the result bool. ``threshold`` 0 finds nothing.
    """
    if threshold == 0:
        return torch.zeros_like(loss_mask)
    divergence = sequence_means(generator_logprobs - logprobs, loss_mask, sequence_ids)
    return loss_mask & (advantages < 0) & (divergence > threshold)
