# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The policy terms, which raise the probability of good tokens and lower that of bad ones.

Each returns the loss of every token; the objective weights and sums them. All inputs are 0 at
untrained tokens, so only means over sequences need the mask.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.loss_metrics import TokenMetric
from torchtitan.grpo.losses.sequences import held_between, ratio, sequence_means


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy term: tensors [rows, seq], 0 at untrained tokens.

    Attributes:
        logprobs: float, of the labels under the current policy; carries gradients.
        old_logprobs: float, of the policy that the ratio is against (``grpo.old_policy``).
        generator_logprobs: float, recorded at sampling time.
        advantages: float, constant within a sequence, except for a teacher's part (``[teacher]``)
            and with a critic (``grpo.advantage = "gae"``).
        entropy: float, of the current policy's distribution at each token; carries gradients.
        loss_mask: bool, True on trained tokens.
        sequence_ids: int64, the token's sequence within its row.
        columns: Further columns of the rollouts that are trained, such as ``teacher_logprobs``,
            [rows, seq] or [rows, seq, k], with the column's ``fill`` at untrained tokens; see
            ``Column`` in `types.py`.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    generator_logprobs: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyTerm:
    """Losses of tokens, [rows, seq] float, and values of metrics by name, ``loss/...``.

    Every call must return the same names with the same reductions.
    """

    token_losses: torch.Tensor
    metrics: dict[str, TokenMetric] = field(default_factory=dict)


PolicyFunction = Callable[..., PolicyTerm]
"""``(inputs: PolicyInputs, config: GRPO, **grpo.policy_loss_options) -> PolicyTerm``"""

SAPO_TEMPERATURE, SAPO_TEMPERATURE_NEGATIVE = 1.0, 1.05
"""Temperatures of SAPO's gate for advantages above 0, and for others. The paper's second is higher,
because negative advantages make training less stable."""

CLIPPED, DUAL_CLIPPED = "loss/clipped_fraction", "loss/dual_clipped_fraction"


def clipped_surrogate(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Clipped surrogate with one ratio for each token, ``r = exp(logprob - old)``.

    ``loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)``: GRPO
    (https://arxiv.org/abs/2402.03300) with DAPO's separate bounds
    (https://arxiv.org/abs/2503.14476). With ``dual_clip = c``, a token with ``A < 0`` loses at most
    ``-c * A`` (https://arxiv.org/abs/1912.09729).
    """
    return _clipped(ratio(inputs.logprobs - inputs.old_logprobs), inputs.advantages, config)


def gspo(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Clipped surrogate with one ratio for each sequence, the geometric mean over its tokens.

    The ratio ``s = exp(mean over trained tokens of (logprob - old))`` is clipped as above: GSPO
    (https://arxiv.org/abs/2507.18071). The gradient is GSPO-token's: the ratio at each token is ``s
    * pi / stop_gradient(pi)``, which has the value of ``s`` and passes the token's own gradient.
    With weight and advantage constant in a sequence, it equals the gradient of ``s``. A token that
    the mismatch weight leaves out gets none.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    sequence_log_ratio = sequence_means(log_ratio.detach(), inputs.loss_mask, inputs.sequence_ids)
    # The carrier is exactly 0 and has the gradient of the token's logprob.
    carrier = inputs.logprobs - inputs.logprobs.detach()
    return _clipped(ratio(sequence_log_ratio + carrier), inputs.advantages, config)


def cispo(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Weights logprobs by the clipped ratio, held constant, so that no token loses its gradient.

    ``loss = -stop_gradient(min(r, 1 + clip_high)) * A * logprob``: CISPO of MiniMax-M1
    (https://arxiv.org/abs/2506.13585), which bounds the weight only from above.
    """
    r = ratio(inputs.logprobs - inputs.old_logprobs).detach()
    weight = r.clamp(max=1 + config.clip_high)
    losses = -weight * inputs.advantages * inputs.logprobs
    return PolicyTerm(losses, {CLIPPED: TokenMetric(weight != r, "mean")})


def reinforce(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """``loss = -A * logprob``, without a ratio (https://arxiv.org/abs/2402.14740)."""
    return PolicyTerm(-inputs.advantages * inputs.logprobs)


def sapo(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Replaces the clip by a gate that takes the gradient away smoothly as the ratio leaves 1.

    ``loss = -4 / t * sigmoid(t * (r - 1)) * A``, with the ratio ``r`` of the token and the
    temperature ``t`` of the sign of ``A``: SAPO (https://arxiv.org/abs/2511.20347). At ``r = 1``
    the gradient is that of the ratio itself.
    """
    r = ratio(inputs.logprobs - inputs.old_logprobs)
    temperature = torch.full_like(r, SAPO_TEMPERATURE).where(
        inputs.advantages > 0, SAPO_TEMPERATURE_NEGATIVE
    )
    gate = torch.sigmoid(temperature * (r - 1)) * (4 / temperature)
    return PolicyTerm(-gate * inputs.advantages)


def gmpo(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Takes the geometric mean of clipped ratios over the sequence.

    ::

        loss = -exp(mean over trained tokens of l) * A
        l = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A <= 0

    GMPO (https://arxiv.org/abs/2507.20673), whose minimum leaves one bound for each sign of the
    advantage. As in :func:`gspo`, each token passes its own gradient, scaled by the mean.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    is_good = inputs.advantages > 0
    held = torch.where(
        is_good,
        held_between(log_ratio, high=config.clip_high),
        held_between(log_ratio, low=-config.clip_low),
    )
    mean = sequence_means(held.detach(), inputs.loss_mask, inputs.sequence_ids)
    # Exactly 0, with the gradient of the token's logprob where it is not clipped.
    carrier = held - held.detach()
    losses = -ratio(mean + carrier) * inputs.advantages
    return PolicyTerm(losses, {CLIPPED: TokenMetric(held != log_ratio, "mean")})


BUILTIN: dict[str, PolicyFunction] = {
    "clip": clipped_surrogate,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
}
"""Policy terms by their names in ``grpo.policy_loss``."""


def _clipped(r: torch.Tensor, advantages: torch.Tensor, config: GRPO) -> PolicyTerm:
    free = -r * advantages
    held = -held_between(r, 1 - config.clip_low, 1 + config.clip_high) * advantages
    losses = torch.maximum(free, held)
    dual_clipped = torch.zeros_like(held > free)
    if config.dual_clip > 0:
        bound = -config.dual_clip * advantages
        dual_clipped = (advantages < 0) & (losses > bound)
        losses = torch.where(dual_clipped, bound, losses)
    metrics = {
        CLIPPED: TokenMetric(held > free, "mean"),
        DUAL_CLIPPED: TokenMetric(dual_clipped, "mean"),
    }
    return PolicyTerm(losses, metrics)
