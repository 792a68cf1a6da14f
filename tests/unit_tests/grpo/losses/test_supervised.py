# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The supervised loss: hand numbers, its gradient, and tokens that do not count."""

import math

import pytest
import torch

from torchtitan.grpo.losses.objective import negative_log_likelihood


def test_two_tokens_of_weight_one_half_give_their_mean_cross_entropy():
    logprobs = torch.tensor([[math.log(0.5), math.log(0.25), -9.0]])
    weights = torch.tensor([[0.5, 0.5, 0.0]])
    expected = (math.log(2) + math.log(4)) / 2
    assert float(negative_log_likelihood(logprobs, weights)) == pytest.approx(expected)


def test_tokens_without_weight_may_hold_anything():
    logprobs = torch.tensor([[-1.0, math.nan, -math.inf]], requires_grad=True)
    loss = negative_log_likelihood(logprobs, torch.tensor([[2.0, 0.0, 0.0]]))
    loss.backward()
    assert loss.item() == 2.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, 0.0, 0.0]]


def test_the_gradient_is_that_of_finite_differences():
    torch.manual_seed(0)
    logprobs = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 5, dtype=torch.float64) * (torch.rand(3, 5) > 0.4)
    assert torch.autograd.gradcheck(lambda x: negative_log_likelihood(x, weights), (logprobs,))
