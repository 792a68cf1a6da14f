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

CLIPPED = "loss/clipped_fraction"


def clipped_surrogate(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Clipped surrogate with one ratio for each token, ``r = exp(logprob - old)``.

    ``loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)``: GRPO
    (https://arxiv.org/abs/2402.03300) with DAPO's separate bounds
    (https://arxiv.org/abs/2503.14476).
    """
    return _clipped(ratio(inputs.logprobs - inputs.old_logprobs), inputs.advantages, config)


def gspo(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Clipped surrogate with one ratio for each sequence, the geometric mean over its tokens.

    The ratio ``s = exp(mean over trained tokens of (logprob - old))`` is clipped as above: GSPO
    (https://arxiv.org/abs/2507.18071). The gradient is GSPO-token's: the ratio at each token is ``s
    * pi / stop_gradient(pi)``, which has the value of ``s`` and passes the token's own gradient.
    With weight and advantage constant in a sequence, this equals the gradient of ``s``. A token that
    the mismatch weight leaves out gets no gradient.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    sequence_log_ratio = sequence_means(log_ratio.detach(), inputs.loss_mask, inputs.sequence_ids)
    # The carrier is exactly 0 and has the gradient of the token's logprob.
    carrier = inputs.logprobs - inputs.logprobs.detach()
    return _clipped(ratio(sequence_log_ratio + carrier), inputs.advantages, config)


def cispo(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
    """Weights logprobs by the clipped ratio without its gradient, so that clipped tokens keep a gradient.

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


BUILTIN: dict[str, PolicyFunction] = {
    "clip": clipped_surrogate,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
"""Policy terms by their names in ``grpo.policy_loss``."""


def _clipped(r: torch.Tensor, advantages: torch.Tensor, config: GRPO) -> PolicyTerm:
    free = -r * advantages
    held = -held_between(r, 1 - config.clip_low, 1 + config.clip_high) * advantages
    return PolicyTerm(torch.maximum(free, held), {CLIPPED: TokenMetric(held > free, "mean")})
