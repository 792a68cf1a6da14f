# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The policy's forward, loss and backward on one microbatch."""

from dataclasses import dataclass

import torch
import torch.nn as nn

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.losses.kl import k3_kl
from torchtitan.grpo.losses.logprobs import token_logprobs
from torchtitan.grpo.losses.policy import clipped_surrogate_loss
from torchtitan.grpo.models.packed_attention import PackedAttentionKind, packed_mask


@dataclass(frozen=True)
class Scorer:
    """Logprobs of the labels under a model.

    Attributes:
        attention: How attention is kept inside sequences.
        temperature: Of the sampling that is scored.
    """

    attention: PackedAttentionKind
    temperature: float

    def __call__(self, model: nn.Module, rows: TrainRows) -> torch.Tensor:
        """Returns [rows, seq] float32."""
        logits = model(
            rows.tokens,
            attention_masks=packed_mask(rows.sequence_ids, self.attention),
            positions=rows.positions,
        )
        return token_logprobs(logits, rows.labels, self.temperature)


SUM_NAMES = ("policy", "reference_kl", "mismatch_kl", "clipped", "capped", "nll")
"""What :func:`loss_and_sums` sums over trained tokens, in this order."""


def loss_and_sums(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    rows: TrainRows,
    config: GRPO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a microbatch as a sum over its trained tokens.

    Args:
        logprobs: [rows, seq] float, of the labels under the policy; carries gradients.
        ref_logprobs: [rows, seq] float, under the reference; None without a KL penalty.
        rows: The microbatch.
        config: ``[grpo]``.

    Returns:
        Scalar [] loss sum, and detached [len(SUM_NAMES)] float64 sums for metrics.
    """
    detached = logprobs.detach()
    on_step_start = config.old_policy == "step_start"
    policy = clipped_surrogate_loss(
        logprobs,
        # One optimizer step a batch: the policy at its start is the present one.
        detached if on_step_start else rows.generator_logprobs,
        rows.generator_logprobs,
        rows.advantages,
        rows.loss_mask,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        importance_cap=config.importance_cap if on_step_start else None,
    )
    loss = policy.loss_sum
    reference_kl = torch.zeros((), device=loss.device)
    if ref_logprobs is not None:
        kl = k3_kl(logprobs, ref_logprobs, rows.loss_mask)
        loss = loss + config.kl_coef * kl
        reference_kl = kl.detach()
    mismatch = k3_kl(rows.generator_logprobs, detached, rows.loss_mask)
    nll = -torch.where(rows.loss_mask, detached, 0.0).sum()
    sums = (policy.loss_sum.detach(), reference_kl, mismatch, policy.clipped_sum,
            policy.capped_sum, nll)  # fmt: skip
    return loss, torch.stack([value.double() for value in sums])
