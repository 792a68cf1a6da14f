"""Losses against numbers worked out by hand, and with anything in masked places."""

import math

import numpy as np
import pytest
import torch

from torchtitan.grpo.losses.advantages import group_normalised_advantages
from torchtitan.grpo.losses.kl import k3_kl
from torchtitan.grpo.losses.logprobs import token_logprobs
from torchtitan.grpo.losses.policy import clipped_surrogate_loss


def test_advantages_are_centred_and_scaled_within_each_group():
    # Group 7: rewards 1, 3: mean 2, sample std sqrt(2). Group 3: 0, 0, 3: mean 1, std sqrt(3).
    rewards = np.array([1.0, 0.0, 3.0, 0.0, 3.0])
    groups = np.array([7, 3, 7, 3, 3])
    got = group_normalised_advantages(rewards, groups, eps=1e-12)
    expected = [-1 / math.sqrt(2), -1 / math.sqrt(3), 1 / math.sqrt(2), -1 / math.sqrt(3),
                2 / math.sqrt(3)]  # fmt: skip
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_lone_samples_and_equal_rewards_have_no_advantage():
    got = group_normalised_advantages(np.array([5.0, 2.0, 2.0]), np.array([1, 2, 2]))
    np.testing.assert_array_equal(got, [0, 0, 0])


def test_advantages_refuse_rewards_that_are_not_finite():
    with pytest.raises(ValueError, match="finite"):
        group_normalised_advantages(np.array([1.0, np.nan]), np.array([1, 1]))


def surrogate(trainer, old, generator, advantages, mask=None, **kwargs):
    tensors = [
        torch.tensor([x], dtype=torch.float64) for x in (trainer, old, generator, advantages)
    ]
    tensors[0].requires_grad_()
    mask = torch.ones_like(tensors[0], dtype=torch.bool) if mask is None else torch.tensor([mask])
    settings = {"clip_low": 0.2, "clip_high": 0.3, "importance_cap": None} | kwargs
    return tensors[0], clipped_surrogate_loss(*tensors, mask, **settings)


def test_clip_bounds_hold_on_the_side_where_they_bind():
    log = math.log
    # ratio 2 with A > 0 is clipped to 1.3, with A < 0 it is not; ratio 0.5 the other way round.
    trainer, loss = surrogate(
        [log(2), log(2), log(0.5), log(0.5)], [0.0] * 4, [0.0] * 4, [1.0, -1.0, 1.0, -1.0]
    )
    assert loss.loss_sum.item() == pytest.approx(-(1.3 - 2 + 0.5 - 0.8))
    assert loss.clipped_sum.item() == 2
    loss.loss_sum.backward()
    # d(-ratio * A) = -ratio * A where not clipped, else 0.
    torch.testing.assert_close(trainer.grad, torch.tensor([[0.0, 2.0, -0.5, 0.0]]).double())


def test_importance_weight_is_truncated_and_carries_no_gradient():
    log = math.log
    trainer, loss = surrogate(
        [0.0, 0.0], [0.0, 0.0], [log(0.1), log(0.8)], [1.0, 1.0], importance_cap=2.0
    )
    # Weights: min(1 / 0.1, 2) = 2 and 1 / 0.8 = 1.25; the ratio is 1.
    assert loss.loss_sum.item() == pytest.approx(-(2 + 1.25))
    assert loss.capped_sum.item() == 1
    loss.loss_sum.backward()
    torch.testing.assert_close(trainer.grad, torch.tensor([[-2.0, -1.25]]).double())


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_masked_places_may_hold_anything(rubbish):
    trainer, loss = surrogate(
        [rubbish, 0.0], [rubbish, 0.0], [rubbish, 0.0], [rubbish, 1.0],
        mask=[False, True], importance_cap=2.0,
    )  # fmt: skip
    assert loss.loss_sum.item() == -1
    loss.loss_sum.backward()
    torch.testing.assert_close(trainer.grad, torch.tensor([[0.0, -1.0]]).double())


def test_surrogate_refuses_differing_shapes():
    a, b = torch.zeros(1, 2), torch.zeros(1, 3)
    with pytest.raises(ValueError, match="one shape"):
        clipped_surrogate_loss(
            a, a, a, b, a.bool(), clip_low=0.2, clip_high=0.2, importance_cap=None
        )


def test_k3_is_the_divergence_in_expectation_and_ignores_masked_places():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    per_token = torch.stack(
        [k3_kl(p.log()[None, i : i + 1], q.log()[None, i : i + 1], torch.ones(1, 1).bool())
         for i in range(3)]
    )  # fmt: skip
    assert (p * per_token).sum().item() == pytest.approx((p * (p / q).log()).sum().item())
    masked = torch.tensor([[True, False]])
    got = k3_kl(torch.tensor([[0.0, math.nan]]), torch.tensor([[0.0, 1.0]]), masked)
    assert got.item() == 0


def test_token_logprobs_are_of_the_tempered_distribution():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = (logits / 0.7).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, labels, 0.7), expected)
