# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Corrects the mismatch between the step's first policy and the sampling-time policy.

Servers compute with other kernels, and with weights that may be some steps old. The loss of each
token is therefore weighted by the bounded ratio of its probabilities in trainer and server, and
whole sequences that are too far from the policy that sampled them are left out.
"""

from dataclasses import dataclass, replace

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.kl import kl_estimate
from torchtitan.grpo.losses.loss_metrics import Metric, mean_metric
from torchtitan.grpo.losses.sequences import (
    ratio,
    sequence_means,
    sequence_sums,
    spread,
)


@dataclass(frozen=True)
class MismatchWeights:
    """Weights of the policy loss, and tokens that the correction changed: detached [rows, seq].

    Attributes:
        weights: float, 0 where not trained, masked, rejected or off-policy.
        ratios: float, for the effective sample size: the weights, or the uncorrected ratios if
            there is no correction.
        capped: bool, trained tokens whose ratio was clamped to a bound.
        masked: bool, all trained tokens that are left out, for whatever reason.
        rejected: bool, trained tokens of sequences that :func:`rejected_sequences` left out.
        off_policy: bool, trained tokens of sequences that :func:`off_policy_sequences` found.
    """

    weights: torch.Tensor
    ratios: torch.Tensor
    capped: torch.Tensor
    masked: torch.Tensor
    rejected: torch.Tensor
    off_policy: torch.Tensor

    def without(self, off_policy: torch.Tensor) -> "MismatchWeights":
        return replace(
            self,
            weights=torch.where(off_policy, 0.0, self.weights),
            ratios=torch.where(off_policy, 0.0, self.ratios),
            capped=self.capped & ~off_policy,
            masked=self.masked | off_policy,
            off_policy=off_policy,
        )


def mismatch_weights(
    proximal_logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    config: GRPO,
) -> MismatchWeights:
    """Computes importance weights ``proximal / generator``, truncated or masked.

    With the ratio ``r`` of a token, or of its sequence (``mismatch_level``)::

        none       1
        truncate   min(max(r, importance_floor), importance_cap)              TIS
        mask       r where importance_floor <= r <= importance_cap, else 0    MIS; IcePop per token

    A sequence that :func:`rejected_sequences` finds gets weight 0 under every correction.
    Truncation is from IMPALA (https://arxiv.org/abs/1802.01561), masking from IcePop
    (https://arxiv.org/abs/2510.18855).

    All tensors are [rows, seq], and may hold anything at untrained tokens. The proximal logprobs are the
    trainer's before the batch's first update. With ``old_policy = "sampling"`` they are the current
    policy's, because the ratio of the policy loss then is the whole correction.
    """
    on_sampling = config.old_policy == "sampling"
    correction = "none" if on_sampling else config.mismatch_correction
    log_ratio = torch.where(loss_mask, (proximal_logprobs - generator_logprobs).detach(), 0.0)
    r = _ratio(log_ratio, loss_mask, sequence_ids, config)
    outside = loss_mask & ((r > config.importance_cap) | (r < config.importance_floor))
    nowhere = torch.zeros_like(outside)
    if correction == "truncate":
        r = r.clamp(config.importance_floor, config.importance_cap)
    rejected = rejected_sequences(log_ratio, loss_mask, sequence_ids, config)
    masked = (outside if correction == "mask" else nowhere) | rejected
    kept = loss_mask & ~masked
    ratios = torch.where(kept, r, 0.0)
    return MismatchWeights(
        weights=kept.to(r.dtype) if correction == "none" else ratios,
        ratios=ratios,
        capped=outside & kept if correction == "truncate" else nowhere,
        masked=masked,
        rejected=rejected,
        off_policy=nowhere,
    )


def _ratio(
    log_ratio: torch.Tensor, loss_mask: torch.Tensor, sequence_ids: torch.Tensor, config: GRPO
) -> torch.Tensor:
    match config.mismatch_level:
        case "token":
            return ratio(log_ratio)
        case "sequence":
            return ratio(spread(sequence_sums(log_ratio, sequence_ids), sequence_ids))
        case "geometric":
            return ratio(sequence_means(log_ratio, loss_mask, sequence_ids))


def rejected_sequences(
    log_ratio: torch.Tensor, loss_mask: torch.Tensor, sequence_ids: torch.Tensor, config: GRPO
) -> torch.Tensor:
    """Returns the trained tokens of sequences whose divergence is above ``grpo.mismatch_max_k3``.

    With ``r = proximal / generator`` of a token, the mean of ``r - 1 - log r`` over the trained
    tokens of a sequence estimates ``KL(generator || proximal)``. Rejection by divergences is from
    https://richardli.xyz/rl-collapse.

    Example: ratios 4 and 1/2 give ``(2.5 - log 2) / 2``. The log-ratios, [rows, seq] float, are 0
    where not trained.
    """
    if config.mismatch_max_k3 == 0:
        return torch.zeros_like(loss_mask)
    k3 = kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3")
    divergences = sequence_means(k3, loss_mask, sequence_ids)
    return loss_mask & (divergences > config.mismatch_max_k3)


def off_policy_sequences(
    logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """Returns the trained tokens of bad sequences that have become unlikely under the policy.

    Off-policy sequence masking of DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): a sequence is
    found if its advantage is negative and ``mean(log generator - log policy) > threshold`` over its
    trained tokens. The policy is the current one, so later steps of a batch find more sequences.

    All tensors are [rows, seq], the logprobs detached and 0 where not trained, advantages constant
    within a sequence. ``threshold`` 0 finds nothing.
    """
    if threshold == 0:
        return torch.zeros_like(loss_mask)
    divergence = sequence_means(generator_logprobs - logprobs, loss_mask, sequence_ids)
    return loss_mask & (advantages < 0) & (divergence > threshold)


def mismatch_metrics(
    mismatch: MismatchWeights,
    old_logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
) -> dict[str, Metric]:
    """Returns metrics. All tensors are [rows, seq]. Logprobs are detached and 0 where not trained."""
    num_tokens = loss_mask.sum()

    def num_sequences(tokens: torch.Tensor) -> torch.Tensor:
        return (sequence_sums(tokens.to(old_logprobs.dtype), sequence_ids) > 0).sum()

    num_trained = num_sequences(loss_mask)
    # In float64: the ratio of a sequence may be so large that its square is not exact.
    ratios = mismatch.ratios.double()
    effective_size = (ratios.sum(), ratios.square().sum(), num_tokens)
    kl = kl_estimate(generator_logprobs, old_logprobs, "k3")
    return {
        "mismatch/kl": mean_metric(kl.sum(), num_tokens),
        "mismatch/effective_sample_size": Metric("effective_size", effective_size),
        "mismatch/capped_fraction": mean_metric(mismatch.capped.sum(), num_tokens),
        "mismatch/masked_fraction": mean_metric(mismatch.masked.sum(), num_tokens),
        "mismatch/rejected_fraction": mean_metric(num_sequences(mismatch.rejected), num_trained),
        "mismatch/off_policy_fraction": mean_metric(
            num_sequences(mismatch.off_policy), num_trained
        ),
    }
