# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Corrects the mismatch between the step's first policy and the sampling-time policy.

Servers compute with other kernels, and with weights that may be some steps old. The loss of each
token is therefore weighted by the bounded ratio of its probabilities in trainer and server.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from torchtitan.grpo.losses.kl import kl_estimate
from torchtitan.grpo.losses.loss_metrics import Metric, mean_metric
from torchtitan.grpo.losses.sequences import ratio, sequence_means, sequence_sums, spread

MismatchLevel = Literal["token", "sequence", "geometric"]
MismatchCorrection = Literal["none", "truncate", "mask"]


@dataclass(frozen=True)
class MismatchWeights:
    """Weights of the policy loss, and tokens that the correction changed: detached [rows, seq].

    Attributes:
        weights: float, 0 where not trained, masked, vetoed, rejected or off-policy.
        ratios: float, for the effective sample size: the weights, or the uncorrected ratios if
            there is no correction.
        capped: bool, trained tokens whose ratio was clamped to a bound.
        masked: bool, all trained tokens that are left out, for whatever reason.
        vetoed: bool, trained tokens of sequences that the veto left out.
        rejected: bool, the same for a bound of `rejection.py`.
        off_policy: bool, the same for off-policy masking.
    """

    weights: torch.Tensor
    ratios: torch.Tensor
    capped: torch.Tensor
    masked: torch.Tensor
    vetoed: torch.Tensor
    rejected: torch.Tensor
    off_policy: torch.Tensor

    def without(self, *, rejected: torch.Tensor, off_policy: torch.Tensor) -> "MismatchWeights":
        """Returns weights with 0 at the tokens of whole sequences, [rows, seq] bool."""
        gone = rejected | off_policy
        return replace(
            self,
            weights=torch.where(gone, 0.0, self.weights),
            ratios=torch.where(gone, 0.0, self.ratios),
            capped=self.capped & ~gone,
            masked=self.masked | gone,
            rejected=self.rejected | rejected,
            off_policy=self.off_policy | off_policy,
        )

    def divided_by(self, mean: torch.Tensor) -> "MismatchWeights":
        """Returns weights divided by a scalar [], their mean over an optimizer step."""
        return replace(self, weights=self.weights / mean, ratios=self.ratios / mean)


def mismatch_ratio(
    log_ratio: torch.Tensor,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    level: MismatchLevel,
) -> torch.Tensor:
    """Returns the ratio of trainer to sampling-time probability at each token.

    ``token`` is the ratio of the token, ``sequence`` the product over the trained tokens of its
    sequence, and ``geometric`` their geometric mean, ``exp(mean(log_ratio))``. The logs are summed,
    and clamped before ``exp`` (see `sequences.py`). ``log_ratio``, [rows, seq] float, is 0 where
    not trained. Raises ValueError if the level is unknown.
    """
    match level:
        case "token":
            return ratio(log_ratio)
        case "sequence":
            return ratio(spread(sequence_sums(log_ratio, sequence_ids), sequence_ids))
        case "geometric":
            return ratio(sequence_means(log_ratio, loss_mask, sequence_ids))
    raise ValueError(f"grpo.mismatch_level must be token, sequence or geometric, got {level!r}.")


def mismatch_weights(
    old_logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    *,
    correction: MismatchCorrection,
    level: MismatchLevel,
    cap: float,
    floor: float,
    veto: float,
) -> MismatchWeights:
    """Computes importance weights ``old / generator``, truncated or masked.

    With the ratio ``r`` of :func:`mismatch_ratio`::

        none       1
        truncate   min(max(r, floor), cap)              TIS
        mask       r where floor <= r <= cap, else 0    MIS; IcePop at token level

    A sequence with a trained token whose own ratio is below ``veto`` gets weight 0 under every
    correction; 0 disables the veto, and a floor of 0 bounds nothing. Truncation is from IMPALA
    (https://arxiv.org/abs/1802.01561), masking from IcePop (https://arxiv.org/abs/2510.18855).

    All tensors are [rows, seq], with anything at untrained tokens. ``old_logprobs`` are the
    trainer's before the batch's first update, and the generator's are of sampling time. Raises
    ValueError if the correction or the level is unknown.
    """
    log_ratio = torch.where(loss_mask, (old_logprobs - generator_logprobs).detach(), 0.0)
    r = mismatch_ratio(log_ratio, loss_mask, sequence_ids, level)
    outside = loss_mask & ((r > cap) | (r < floor))
    capped, masked = _capped_and_masked(correction, outside)
    if correction == "truncate":
        r = r.clamp(floor, cap)
    vetoed = torch.zeros_like(loss_mask)
    if veto > 0:
        culprits = (loss_mask & (log_ratio < math.log(veto))).to(log_ratio.dtype)
        vetoed = loss_mask & (spread(sequence_sums(culprits, sequence_ids), sequence_ids) > 0)
        masked = masked | vetoed
    kept = loss_mask & ~masked
    ratios = torch.where(kept, r, 0.0)
    return MismatchWeights(
        weights=kept.to(r.dtype) if correction == "none" else ratios,
        ratios=ratios,
        capped=capped & ~vetoed,
        masked=masked,
        vetoed=vetoed,
        rejected=torch.zeros_like(loss_mask),
        off_policy=torch.zeros_like(loss_mask),
    )


def _capped_and_masked(
    correction: MismatchCorrection, outside: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    nowhere = torch.zeros_like(outside)
    match correction:
        case "none":
            return nowhere, nowhere
        case "truncate":
            return outside, nowhere
        case "mask":
            return nowhere, outside
        case _:
            raise ValueError(
                f"grpo.mismatch_correction must be none, truncate or mask, got {correction!r}."
            )


def mismatch_metrics(
    mismatch: MismatchWeights,
    old_logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
) -> dict[str, Metric]:
    """Returns the ``mismatch/...`` metrics of a microbatch.

    All tensors are [rows, seq]; the logprobs are detached and 0 where not trained.
    """
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
        "mismatch/vetoed_fraction": mean_metric(num_sequences(mismatch.vetoed), num_trained),
        "mismatch/rejected_fraction": mean_metric(num_sequences(mismatch.rejected), num_trained),
        "mismatch/off_policy_fraction": mean_metric(
            num_sequences(mismatch.off_policy), num_trained
        ),
    }
