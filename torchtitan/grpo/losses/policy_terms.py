# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The policy term: what raises the probability of good tokens and lowers that of bad ones.

Each function gives the loss of every token; the objective weighs and sums them. Inputs are
0 wherever a token is not trained, so nothing here looks at the mask but sequence means.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.loss_metrics import TokenMetric
from torchtitan.grpo.losses.ratios import ratio
from torchtitan.grpo.losses.sequences import sequence_means


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy term may look at; all [rows, seq], all 0 where not trained.

    Attributes:
        logprobs: Of the labels under the current policy; carries gradients.
        old_logprobs: Of the policy that the ratio is taken against (``grpo.old_policy``).
        generator_logprobs: Recorded at sampling time.
        advantages: Constant within a sequence.
        entropy: Of the current policy's distribution at each token; carries gradients. 0
            where neither ``grpo.entropy_coef`` nor ``grpo.log_entropy`` asks for it.
        loss_mask: bool, True on trained tokens.
        sequence_ids: int64, row-local.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    generator_logprobs: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor


@dataclass(frozen=True)
class PolicyTerm:
    """Losses of tokens, and metrics of how they came about.

    Attributes:
        token_losses: [rows, seq] float.
        metrics: Values at tokens by metric name, ``loss/...``. Every call must return the same
            names with the same reductions.
    """

    token_losses: torch.Tensor
    metrics: dict[str, TokenMetric] = field(default_factory=dict)


PolicyFunction = Callable[..., PolicyTerm]
"""``(inputs: PolicyInputs, config: GRPO, **options) -> PolicyTerm``, the options being
``grpo.policy_loss_options``."""

CLIPPED, DUAL_CLIPPED = "loss/clipped_fraction", "loss/dual_clipped_fraction"


def clipped_surrogate(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Clipped surrogate with one ratio a token, ``r = exp(logprob - old)``.

    ::

        loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    GRPO (https://arxiv.org/abs/2402.03300) with DAPO's separate bounds
    (https://arxiv.org/abs/2503.14476). With ``dual_clip = c``, the loss of a token with
    ``A < 0`` is at most ``-c * A`` (https://arxiv.org/abs/1912.09729).
    """
    return _clipped(ratio(inputs.logprobs - inputs.old_logprobs), inputs.advantages, config)


def gspo(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Clipped surrogate with one ratio a sequence, the geometric mean of its tokens'.

    ``s = exp(mean over trained tokens of (logprob - old))``, clipped as above: GSPO
    (https://arxiv.org/abs/2507.18071). The gradient is GSPO-token's: at each token the
    ratio is ``s * pi / stop_gradient(pi)``, which has the value of ``s`` and passes each
    token's own gradient. Where weight and advantage are constant in a sequence, that is
    the gradient of ``s`` itself; where a mismatch weight leaves a token out, that token
    gets none.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    sequence_log_ratio = sequence_means(log_ratio.detach(), inputs.loss_mask, inputs.sequence_ids)
    # Exactly 0, with the gradient of the token's logprob.
    carrier = inputs.logprobs - inputs.logprobs.detach()
    return _clipped(ratio(sequence_log_ratio + carrier), inputs.advantages, config)


def cispo(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """The clipped ratio as a constant weight, so that no token loses its gradient.

    ``loss = -stop_gradient(min(r, 1 + clip_high)) * A * logprob``: CISPO of MiniMax-M1
    (https://arxiv.org/abs/2506.13585), which bounds the weight from above alone;
    ``cispo_two_sided`` also holds it above ``1 - clip_low``.
    """
    r = ratio(inputs.logprobs - inputs.old_logprobs).detach()
    weight = r.clamp(max=1 + config.clip_high)
    if config.cispo_two_sided:
        weight = weight.clamp(min=1 - config.clip_low)
    losses = -weight * inputs.advantages * inputs.logprobs
    return PolicyTerm(losses, {CLIPPED: TokenMetric(weight != r, "mean")})


def reinforce(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """``loss = -A * logprob``, without a ratio (https://arxiv.org/abs/2402.14740)."""
    return PolicyTerm(-inputs.advantages * inputs.logprobs)


BUILTIN: dict[str, PolicyFunction] = {
    "clip": clipped_surrogate,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
"""The policy terms that ``grpo.policy_loss`` knows by name."""


def _clipped(r: torch.Tensor, advantages: torch.Tensor, config: GRPO) -> PolicyTerm:
    free = -r * advantages
    held = -r.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
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
