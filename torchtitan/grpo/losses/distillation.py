# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""On-policy distillation: reverse KL divergence from a teacher, of sampled or of many tokens.

If the teacher rates only sampled tokens, the divergence is an advantage of each token. For the logprobs
``s`` and ``t`` of student and teacher for a token that the student sampled::

    advantage = -coef * ((s - t) - baseline)

The expectation of ``s - t`` over the student's samples is ``KL(student || teacher)`` at that
position, and the policy gradient with this advantage is its gradient, whatever the baseline is.
This is GKD with reverse KL on sampled sequences (https://arxiv.org/abs/2306.13649), in the form of
https://thinkingmachines.ai/blog/on-policy-distillation/: each token answers only for itself.

The baseline is the mean of ``s - t`` over the trained tokens of the prompt's rollouts. Without a
baseline, the many tokens that both models find likely would get advantages near 0, and the gradient would
consist of the few tokens that the teacher rejects. Both logprobs are those recorded at sampling time.

With the teacher's ``k`` most likely tokens (``teacher.top_k``) the divergence is a separate loss,
:func:`top_k_reverse_kl`. It is computed exactly and not from the sampled token, which adds no noise.
"""

from dataclasses import dataclass

import numpy as np
import torch

TAIL_FLOOR = 1e-6
"""Least probability of "any other token", about the error of what float32 logprobs leave of 1."""

_LOGPROB_FLOOR = -100.0
"""Replaces lower logprobs, whose probabilities float32 cannot hold precisely."""


@dataclass(frozen=True)
class TopLogprobs:
    """Student's and teacher's logprobs of the teacher's most likely tokens, [rows, seq, k] float.

    The student's logprobs, under the current policy, carry gradients. They are -inf for a token that only
    the teacher's vocabulary has. Where ``is_rated`` [rows, seq] is False, both logprobs may be NaN.
    """

    student: torch.Tensor
    teacher: torch.Tensor
    is_rated: torch.Tensor

    def only(self, mask: torch.Tensor) -> "TopLogprobs":
        """Returns a copy with logprobs of 0, without gradients, outside of ``mask`` [rows, seq] bool."""
        kept = self.is_rated & mask

        def masked(values: torch.Tensor) -> torch.Tensor:
            return torch.where(kept.unsqueeze(-1), values, 0.0)

        return TopLogprobs(masked(self.student), masked(self.teacher), kept)


def top_k_reverse_kl(
    student_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor
) -> torch.Tensor:
    """Returns the reverse KL divergence over ``k`` tokens and "any other token", as one outcome.

    With ``s`` and ``t`` the logprobs of student and teacher, and ``S`` and ``T`` the sums of their
    probabilities over the ``k`` tokens::

        sum of exp(s) * (s - t)  +  (1 - S) * log((1 - S) / (1 - T))

    Reverse KL is GKD's divergence on sampled sequences (https://arxiv.org/abs/2306.13649). By the
    data processing inequality, the divergence of these coarsened distributions is at most that over
    the vocabulary. The two divergences are equal if the ``k`` tokens are the whole vocabulary, or if both
    models distribute the remaining probability in the same proportions.

    Both ``1 - S`` and ``1 - T`` are at least :data:`TAIL_FLOOR`, so that values and gradients are
    finite for all finite logprobs, and also for the student's -inf (a probability of 0). Where this
    bound applies, "any other token" has no gradient.

    Both logprobs are [..., k] float, of the same, distinct tokens, under the softmax over the whole
    vocabulary at temperature 1. The teacher's logprobs are finite. Returns nats, [...].
    """
    student = student_logprobs.clamp(min=_LOGPROB_FLOOR)
    probabilities = student.exp()
    of_tokens = (probabilities * (student - teacher_logprobs)).sum(-1)
    rest, teacher_rest = _rest(probabilities), _rest(teacher_logprobs.exp())
    return of_tokens + rest * (rest.log() - teacher_rest.log())


def _rest(probabilities: torch.Tensor) -> torch.Tensor:
    return (1 - probabilities.sum(-1)).clamp(min=TAIL_FLOOR)


def sampled_reverse_kl(
    student_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    max_divergence: float = 0.0,
) -> torch.Tensor:
    """Returns ``student - teacher`` of each trained token that is rated, and 0 elsewhere.

    All tensors are [rows, seq]. Logprobs are at temperature 1. The student's were recorded at sampling
    time; the teacher's are NaN if not rated. ``max_divergence`` clamps on both sides; 0 bounds nothing.
    """
    is_rated = loss_mask & ~teacher_logprobs.isnan()
    divergences = torch.where(is_rated, student_logprobs - teacher_logprobs, 0.0)
    return divergences.clamp(-max_divergence, max_divergence) if max_divergence else divergences


def sample_sums(
    teacher_kl: torch.Tensor, sample_ids: torch.Tensor, num_samples: int
) -> torch.Tensor:
    """Sums :func:`sampled_reverse_kl` over the tokens of each sample, [samples] float64.

    ``sample_ids``, [rows, seq] int64, are below 0 where there is no sample.
    """
    is_sample = sample_ids >= 0
    sums = torch.zeros(num_samples, dtype=torch.float64, device=teacher_kl.device)
    return sums.index_add_(0, sample_ids[is_sample], teacher_kl[is_sample].double())


def group_baselines(sums: np.ndarray, lengths: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Returns the mean divergence per trained token of each sample's group, [samples] float64."""
    _, member_of = np.unique(group_ids, return_inverse=True)
    totals, tokens = np.bincount(member_of, sums), np.bincount(member_of, lengths)
    return (totals / np.maximum(tokens, 1))[member_of]


def with_teacher(
    advantages: torch.Tensor, teacher_kl: torch.Tensor, *, coef: float
) -> torch.Tensor:
    """Returns ``advantages - coef * teacher_kl``, [rows, seq], both 0 where not trained.

    ``advantages`` must be those from rewards, plus ``coef`` times the baseline.
    """
    return advantages - coef * teacher_kl
