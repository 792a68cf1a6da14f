# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Generalized advantage estimation over packed rows, and the loss of the critic.

A sequence of a row is an episode. Its decisions are its trained tokens or, at turn level, its turns:
maximal runs of trained tokens. Context between turns is skipped, so that the value after a decision
is that of the next decision. With rewards ``r``, values ``V`` and the decisions of one episode
counted from 0 (https://arxiv.org/abs/1506.02438)::

    delta_t = r_t + gamma * V_{t+1} - V_t           V is 0 after the last decision
    A_t     = delta_t + gamma * lambda * A_{t+1}
    R_t     = A_t + V_t                             the target of the critic

Example: two trained tokens with ``V = 0.5, 0.25``, a reward of 1 at the second one, ``gamma = 1`` and
``lambda = 0.5``: ``delta = -0.25, 0.75``, so that ``A = 0.125, 0.75`` and ``R = 0.625, 1``.

The value of a decision is computed at the position that predicts the decision's first token. It then depends
on the context of the decision but on none of the decision's tokens, as a baseline must.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

DecisionLevel = Literal["token", "turn"]

WHITENING_EPS = 1e-8
"""Number that is added to the variance by which advantages are whitened."""


@dataclass(frozen=True)
class Decisions:
    """The decisions of packed rows, row by row; indices are into flattened rows, all int64.

    Attributes:
        tokens: [tokens], the trained tokens.
        of_token: [tokens], the decision of each of them.
        begins: [decisions], the first token of each decision.
        continues: [decisions] bool, whether the next decision belongs to the same sequence.
    """

    tokens: torch.Tensor
    of_token: torch.Tensor
    begins: torch.Tensor
    continues: torch.Tensor

    def __len__(self) -> int:
        return len(self.begins)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums values [rows, seq] over the tokens of each decision, [decisions] float64."""
        sums = torch.zeros(len(self), dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self.of_token, values.flatten()[self.tokens].double())

    def at_begins(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values [rows, seq] at the first token of each decision, [decisions] float64."""
        return values.flatten()[self.begins].double()

    def on_tokens(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Copies each decision's value to all of the decision's tokens: [decisions] to [rows, seq] float32."""
        flat = torch.zeros(shape.numel(), device=values.device)
        return flat.index_copy_(0, self.tokens, values[self.of_token].float()).view(shape)

    def on_begins(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Puts each decision's value on its first token, 0 elsewhere: [decisions] to [rows, seq] float32."""
        flat = torch.zeros(shape.numel(), device=values.device)
        return flat.index_copy_(0, self.begins, values.float()).view(shape)

    def lengths(self) -> torch.Tensor:
        """Returns the number of decisions in each decision's sequence, [decisions] float64."""
        is_first = F.pad(~self.continues, (1, 0), value=True)[: len(self)]
        sequence = is_first.long().cumsum(0) - 1
        counts = torch.zeros(len(self), dtype=torch.float64, device=sequence.device)
        counts.index_add_(0, sequence, torch.ones_like(counts))
        return counts[sequence]


def find_decisions(
    loss_mask: torch.Tensor, sequence_ids: torch.Tensor, level: DecisionLevel
) -> Decisions:
    """Finds the decisions of rows whose sequences have their tokens in order; inputs are [rows, seq].

    The host waits for the device, because the result's size is the number of decisions.
    """
    seq_len = loss_mask.shape[1]
    tokens = loss_mask.flatten().nonzero().squeeze(1)
    # Sequence ids are below the number of tokens of a row.
    sequences = tokens // seq_len * seq_len + sequence_ids.flatten()[tokens]
    is_same = sequences[1:] == sequences[:-1]  # each token but the first, and the one before it
    begins = torch.ones_like(is_same) if level == "token" else ~(is_same & (tokens.diff() == 1))
    begins = F.pad(begins, (1, 0), value=True)[: len(tokens)]
    of_token = begins.long().cumsum(0) - 1
    firsts = begins.nonzero().squeeze(1)
    owners = sequences[firsts]
    continues = F.pad(owners[1:] == owners[:-1], (0, 1), value=False)[: len(firsts)]
    return Decisions(tokens, of_token, tokens[firsts], continues)


def token_rewards(
    rewards: torch.Tensor, sample_ids: torch.Tensor, decisions: Decisions
) -> torch.Tensor:
    """Puts each sample's reward on the last decision of each of its sequences. Returns [decisions] float64.

    ``rewards`` [samples] float64 are indexed by ``sample_ids`` [rows, seq]. Each of several sequences
    of one sample is an episode of its own, with the whole reward.
    """
    of_decision = rewards[sample_ids.flatten()[decisions.begins]]
    return torch.where(decisions.continues, 0.0, of_decision)


def estimate_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    decisions: Decisions,
    *,
    gamma: float,
    lam: float | torch.Tensor,
) -> torch.Tensor:
    """Returns the advantages of decisions. All tensors, including a tensor ``lam``, are [decisions] float64.

    The recurrence is evaluated by doubling: after k rounds each sum spans 2^k decisions.
    """
    following = torch.where(decisions.continues, _shifted(values, 1), 0.0)
    sums = rewards + gamma * following - values
    decays = decisions.continues.double() * gamma * lam
    span = 1
    while span < len(decisions):
        sums = sums + decays * _shifted(sums, span)
        decays = decays * _shifted(decays, span)
        span *= 2
    return sums


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    return F.pad(values[by:], (0, min(by, len(values))))


def moments(values: torch.Tensor, about: float = 0.0) -> torch.Tensor:
    """Returns [3] float64: the number of values [n], their sum, and the sum of their squares.

    ``about`` is first subtracted from the values, because sums of squares are accurate only near 0.
    """
    values = values.double() - about
    count = torch.tensor(float(len(values)), dtype=torch.float64, device=values.device)
    return torch.stack([count, values.sum(), values.square().sum()])


def mean_and_variance(totals: torch.Tensor) -> tuple[float, float]:
    """Returns mean and variance (divided by n - 1) from :func:`moments`. One value has a variance of 0."""
    count, total, squares = totals.tolist()
    mean = total / max(count, 1.0)
    spread = squares - total * mean
    # Of equal numbers, only rounding errors would be left.
    return mean, spread / max(count - 1, 1.0) if spread > 2e-14 * squares else 0.0


def whitened(advantages: torch.Tensor, totals: torch.Tensor, about: float = 0.0) -> torch.Tensor:
    """Normalizes advantages with the mean and variance in ``totals``, the :func:`moments` around ``about``.

    As in TRL and verl, returns ``(A - mean) / sqrt(variance + 1e-8)``, with the variance divided by n - 1.
    """
    mean, variance = mean_and_variance(totals)
    return (advantages - about - mean) * (variance + WHITENING_EPS) ** -0.5


def explained_variance(of_errors: torch.Tensor, of_returns: torch.Tensor) -> float:
    """Returns ``1 - var(R - V) / var(R)``, from :func:`moments`, or 0 if all returns ``R`` are equal.

    It is 1 for a perfect critic, 0 for one no better than a constant, and below 0 for a worse one.
    """
    variance = mean_and_variance(of_returns)[1]
    return 1 - mean_and_variance(of_errors)[1] / variance if variance > 0 else 0.0


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    clip: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted sum of clipped squared errors [], and where the clip applies [rows, seq].

    The clipped error is ``0.5 * max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2)``, as in the
    code of PPO (https://arxiv.org/abs/1707.06347). A ``clip`` of 0 clips nothing. All inputs are [rows, seq].
    Where the weight is 0, the other inputs may hold anything.
    """
    counts = weights > 0
    values = torch.where(counts, values, 0.0)
    old_values, returns = torch.where(counts, old_values, 0.0), torch.where(counts, returns, 0.0)
    squares = (values - returns).square()
    is_clipped = torch.zeros_like(counts)
    if clip > 0:
        held = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        is_clipped = held > squares
        squares = torch.maximum(squares, held)
    return 0.5 * (torch.where(counts, weights, 0.0) * squares).sum(), is_clipped
