# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The clipped policy term, and the truncated correction of sampling-time logprobs."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PolicyLoss:
    """A loss summed over trained tokens, and sums for metrics.

    Attributes:
        loss_sum: Scalar []; the caller divides by the global number of trained tokens.
        clipped_sum: Detached []; tokens on which the clip bound was active.
        capped_sum: Detached []; tokens whose importance weight was truncated.
    """

    loss_sum: torch.Tensor
    clipped_sum: torch.Tensor
    capped_sum: torch.Tensor


def truncated_importance_weights(
    old_logprobs: torch.Tensor, generator_logprobs: torch.Tensor, cap: float
) -> torch.Tensor:
    """``min(pi_old / pi_generator, cap)`` per token, detached.

    Corrects for the gap between the policy that the ratio is taken against and the one
    that sampled (other kernels, older weights), with the variance bounded by ``cap``
    (truncated importance sampling, as in IMPALA, https://arxiv.org/abs/1802.01561).
    """
    return torch.exp(old_logprobs - generator_logprobs).clamp(max=cap).detach()


def clipped_surrogate_loss(
    trainer_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float | None,
) -> PolicyLoss:
    """Clipped surrogate, weighted by a truncated importance weight.

    GRPO (https://arxiv.org/abs/2402.03300) with DAPO's separate clip bounds
    (https://arxiv.org/abs/2503.14476)::

        ratio = exp(trainer - old)
        loss  = -sum(weight * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A))

    Values in masked places may be anything, NaN included.

    Args:
        trainer_logprobs: [rows, seq] float, under the current policy; carries gradients.
        old_logprobs: [rows, seq] float, of the policy that the ratio is taken against.
        generator_logprobs: [rows, seq] float, recorded at sampling time.
        advantages: [rows, seq] float, constant within a rollout.
        loss_mask: [rows, seq] bool, True on trained tokens.
        clip_low: The ratio's floor is ``1 - clip_low``.
        clip_high: The ratio's ceiling is ``1 + clip_high``.
        importance_cap: Bound of the importance weight ``old / generator``; None applies
            no weight.

    Raises:
        ValueError: The five shapes differ.
    """
    shapes = {
        tuple(t.shape)
        for t in (trainer_logprobs, old_logprobs, generator_logprobs, advantages, loss_mask)
    }
    if len(shapes) != 1:
        raise ValueError(f"All five inputs must have one shape, got {sorted(shapes)}.")

    def masked(values: torch.Tensor) -> torch.Tensor:
        # Before any arithmetic: 0 * NaN would be NaN, in the loss and in its gradient.
        return torch.where(loss_mask, values, 0.0)

    old = masked(old_logprobs)
    advantages = masked(advantages)
    ratio = torch.exp(masked(trainer_logprobs) - old)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    capped_sum = torch.zeros((), device=ratio.device)
    if importance_cap is not None:
        generator = masked(generator_logprobs)
        objective = objective * truncated_importance_weights(old, generator, importance_cap)
        capped_sum = ((old - generator).exp() > importance_cap).sum()
    return PolicyLoss(
        loss_sum=-masked(objective).sum(),
        clipped_sum=((ratio * advantages > clipped * advantages) & loss_mask).sum().detach(),
        capped_sum=capped_sum.detach(),
    )
