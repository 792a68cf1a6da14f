"""KL estimates against numbers worked out by hand, and their gradients in expectation."""

import math

import pytest
import torch

from torchtitan.grpo.losses.kl import kl_estimate, sample_kl_sums

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # The policy is twice as likely as the other, then half: d = -log 2, then log 2.
    [
        ("k1", [math.log(2), -math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2] * 2),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
        ("abs", [math.log(2)] * 2),
    ],
)
def test_estimates_are_those_worked_out_by_hand(estimator, expected):
    policy = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    other = torch.tensor([0.4, 0.4], dtype=torch.float64).log()
    got = kl_estimate(policy, other, estimator)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_the_divergence_in_expectation(estimator):
    divergence = (P * (P / Q).log()).sum()
    torch.testing.assert_close((P * kl_estimate(P.log(), Q.log(), estimator)).sum(), divergence)


def expected_gradient(estimator: str) -> torch.Tensor:
    """Of the estimate as a loss, over tokens that the policy draws."""
    logits = P.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (P * kl_estimate(logprobs, Q.log(), estimator)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_as_a_loss_only_k2_has_the_gradient_of_the_divergence():
    logits = P.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (logprobs.exp() * (logprobs - Q.log())).sum().backward()
    torch.testing.assert_close(expected_gradient("k2"), logits.grad)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros_like(P))
    # k3's is that of the divergence the other way round, KL(other || policy).
    torch.testing.assert_close(expected_gradient("k3"), P - Q)


def test_k3_stays_finite_and_keeps_pulling_where_the_policy_lost_a_token():
    policy = torch.tensor([-900.0], requires_grad=True)
    value = kl_estimate(policy, torch.tensor([0.0]), "k3")
    value.sum().backward()
    assert value.isfinite().all()
    assert policy.grad is not None
    assert policy.grad.item() == 1.0


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match=r"grpo\.kl_estimator must be .*got 'k4'"):
        kl_estimate(P, Q, "k4")  # pyright: ignore


def test_penalties_of_samples_are_sums_over_their_tokens_wherever_they_lie():
    nan = math.nan
    policy = torch.tensor([[nan, -1.0, -2.0, nan], [-3.0, nan, nan, -1.0]], requires_grad=True)
    ref = torch.tensor([[nan, -2.0, -2.5, 0.0], [-1.0, nan, 0.0, -1.25]])
    mask = torch.tensor([[False, True, True, False], [True, False, False, True]])
    ids = torch.tensor([[2, 2, 2, -1], [0, -1, -1, 2]])
    got = sample_kl_sums(policy, ref, mask, ids, num_samples=4, estimator="k1")
    torch.testing.assert_close(
        got, torch.tensor([-2.0, 0.0, 1.0 + 0.5 + 0.25, 0.0], dtype=torch.float64)
    )
    assert not got.requires_grad
    by_row = [
        sample_kl_sums(p[None], r[None], m[None], i[None], num_samples=4, estimator="k1")
        for p, r, m, i in zip(policy, ref, mask, ids, strict=True)
    ]
    torch.testing.assert_close(by_row[0] + by_row[1], got)
