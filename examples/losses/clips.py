# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Losses that limit the ratio in other ways than the built-in ones; name one in a TOML file.

::

    [grpo]
    policy_loss = "examples/losses/clips.py:dual_clip"
    [grpo.policy_loss_options]
    bound = 3.0

`grpo.clip_low` and `grpo.clip_high` are the bounds of the ratio, as in the built-in losses.
"""

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.loss_metrics import TokenMetric
from torchtitan.grpo.losses.policy_terms import (
    CLIPPED,
    PolicyInputs,
    PolicyTerm,
    clipped_surrogate,
)
from torchtitan.grpo.losses.sequences import held_between, ratio, sequence_means


def dual_clip(inputs: PolicyInputs, config: GRPO, *, bound: float = 3.0) -> PolicyTerm:
    """``clip``, where a token with ``A < 0`` loses at most ``-bound * A``, however large its ratio is.

    Dual-clip PPO (https://arxiv.org/abs/1912.09729); ``bound`` is above 1.
    """
    term = clipped_surrogate(inputs, config)
    most = -bound * inputs.advantages
    is_bounded = (inputs.advantages < 0) & (term.token_losses > most)
    metrics = term.metrics | {"loss/dual_clipped_fraction": TokenMetric(is_bounded, "mean")}
    return PolicyTerm(torch.where(is_bounded, most, term.token_losses), metrics)


def sapo(
    inputs: PolicyInputs,
    config: GRPO,
    *,
    temperature: float = 1.0,
    temperature_negative: float = 1.05,
) -> torch.Tensor:
    """A gate in place of the clip, which takes the gradient away smoothly as the ratio leaves 1.

    ``loss = -4 / t * sigmoid(t * (r - 1)) * A``, with the ratio ``r`` of the token and the
    temperature ``t`` of the sign of ``A``: SAPO (https://arxiv.org/abs/2511.20347), with
    ``aggregation = "sequence_mean"``.
    """
    r = ratio(inputs.logprobs - inputs.old_logprobs)
    t = torch.full_like(r, temperature).where(inputs.advantages > 0, temperature_negative)
    return -torch.sigmoid(t * (r - 1)) * (4 / t) * inputs.advantages


def gmpo(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """The geometric mean of clipped ratios over the sequence.

    ::

        loss = -exp(mean over trained tokens of l) * A
        l = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A <= 0

    GMPO (https://arxiv.org/abs/2507.20673), with 0.4 for both bounds and ``aggregation =
    "sequence_mean"``. Each token passes its own gradient, scaled by the mean. Not for a critic: the
    advantage must have one sign in a sequence.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    held = torch.where(
        inputs.advantages > 0,
        held_between(log_ratio, high=config.clip_high),
        held_between(log_ratio, low=-config.clip_low),
    )
    mean = sequence_means(held.detach(), inputs.loss_mask, inputs.sequence_ids)
    # Exactly 0, with the gradient of the token's logprob where it is not clipped.
    carrier = held - held.detach()
    losses = -ratio(mean + carrier) * inputs.advantages
    return PolicyTerm(losses, {CLIPPED: TokenMetric(held != log_ratio, "mean")})
