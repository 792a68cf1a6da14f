# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The teacher's part of advantages: hand numbers, and the gradient of the divergence itself."""

import math

import numpy as np
import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.distillation import (
    group_baselines,
    sample_sums,
    sampled_reverse_kl,
    with_teacher,
)
from torchtitan.grpo.losses.policy_terms import PolicyInputs, reinforce


def test_a_token_that_the_teacher_likes_less_has_a_negative_advantage():
    student = torch.tensor([[0.5, 0.25, 0.1]]).log()
    teacher = torch.tensor([[0.25, 0.5, 0.1]]).log()
    divergence = sampled_reverse_kl(student, teacher, torch.ones(1, 3, dtype=torch.bool))
    assert divergence.tolist()[0] == pytest.approx([math.log(2), -math.log(2), 0.0], abs=1e-6)
    rewards = torch.tensor([[1.0, 1.0, 1.0]])
    half = math.log(2) / 2
    found = with_teacher(rewards, divergence, coef=0.5)
    assert found.tolist()[0] == pytest.approx([1 - half, 1 + half, 1.0], abs=1e-6)
    assert torch.equal(with_teacher(rewards, divergence, coef=0.0), rewards)


def test_the_baseline_is_the_mean_over_the_tokens_of_a_group():
    divergence = torch.tensor([[0.0, 2.0, 4.0, 0.0, 1.0, 9.0]])
    sample_ids = torch.tensor([[0, 0, 0, 1, 1, -1]])
    sums = sample_sums(divergence, sample_ids, 3)
    assert sums.tolist() == [6.0, 1.0, 0.0]
    lengths, groups = np.array([2, 1, 0]), np.array([7, 7, 3])
    assert group_baselines(sums.numpy(), lengths, groups).tolist() == pytest.approx(
        [7 / 3, 7 / 3, 0]
    )


def test_tokens_that_are_not_trained_or_not_rated_count_nothing_and_a_bound_holds_on_both_sides():
    student = torch.tensor([[-1.0, 0.0, torch.nan, -9.0, -0.5]])
    teacher = torch.tensor([[-3.0, torch.nan, -1.0, -1.0, -9.0]])
    mask = torch.tensor([[True, True, False, True, True]])
    assert sampled_reverse_kl(student, teacher, mask).tolist() == [[2.0, 0.0, 0.0, -8.0, 8.5]]
    bounded = sampled_reverse_kl(student, teacher, mask, max_divergence=5.0)
    assert bounded.tolist() == [[2.0, 0.0, 0.0, -5.0, 5.0]]


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence(baseline):
    """All tokens of a vocabulary, each weighted by its probability, are one exact expectation."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    divergence = (student - teacher).detach()[None]
    inputs = PolicyInputs(
        logprobs=student[None], old_logprobs=student.detach()[None],
        generator_logprobs=student.detach()[None],
        advantages=with_teacher(torch.full_like(divergence, baseline), divergence, coef=1.0),
        entropy=torch.zeros_like(divergence), loss_mask=torch.ones(1, 6, dtype=torch.bool),
        sequence_ids=torch.zeros(1, 6, dtype=torch.int64),
    )  # fmt: skip
    losses = reinforce(inputs, GRPO()).token_losses
    (found,) = torch.autograd.grad((student.detach().exp() * losses[0]).sum(), logits)

    def kl(values: torch.Tensor) -> float:
        policy = values.log_softmax(-1)
        return float((policy.exp() * (policy - teacher)).sum())

    step = 1e-5
    base = logits.detach()
    for i in range(6):
        shift = torch.zeros(6, dtype=torch.float64)
        shift[i] = step
        expected = (kl(base + shift) - kl(base - shift)) / (2 * step)
        assert found[i].item() == pytest.approx(expected, abs=1e-8)
