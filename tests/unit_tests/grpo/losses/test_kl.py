"""KL estimates against numbers worked out by hand, and their gradients in expectation."""

import math
from collections.abc import Callable

import pytest
import torch

from torchtitan.grpo.losses.kl import kl_estimate, sample_kl_sums

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


DIVERGENCE = (P * (P / Q).log()).sum()
OF_DIVERGENCE = P * ((P / Q).log() - DIVERGENCE)  # its gradient with respect to P's logits


def gradient(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Of an expected loss, a function of P's log-probabilities, with respect to the logits."""
    logits = P.log().requires_grad_()
    return torch.autograd.grad(loss_of(logits.log_softmax(-1)).sum(), logits)[0]


def test_estimates_are_those_worked_out_by_hand():
    """The policy is twice as likely as the other, and then half as likely."""
    policy, other, log2 = (
        torch.tensor([0.8, 0.2]).log(),
        torch.tensor([0.4, 0.4]).log(),
        math.log(2),
    )
    expected = {
        "k1": [log2, -log2], "k2": [log2**2 / 2] * 2, "k3": [log2 - 0.5, 1 - log2]
    }  # fmt: skip
    for estimator, values in expected.items():
        assert kl_estimate(policy, other, estimator).tolist() == pytest.approx(values, rel=1e-5)


def test_in_expectation_k1_and_k3_are_the_divergence_and_as_a_loss_k2_has_its_gradient():
    for estimator in ("k1", "k3"):
        found = (P * kl_estimate(P.log(), Q.log(), estimator)).sum()
        torch.testing.assert_close(found, DIVERGENCE)
    # k3's gradient is that of the divergence the other way round, KL(other || policy).
    gradients = {"k1": torch.zeros_like(P), "k2": OF_DIVERGENCE, "k3": P - Q}
    for estimator, expected in gradients.items():
        found = gradient(lambda logprobs, e=estimator: P * kl_estimate(logprobs, Q.log(), e))
        torch.testing.assert_close(found, expected)


def k3(differences: list[float] | torch.Tensor, dtype=torch.float32):
    """``k3`` at ``d = other - policy``, and its gradient with respect to the policy's logprobs."""
    d = torch.as_tensor(differences, dtype=dtype)
    policy = (-d).requires_grad_()
    value = kl_estimate(policy, torch.zeros_like(d), "k3")
    (gradient,) = torch.autograd.grad(value.sum(), policy)
    return value.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distance", [25.0, 60.0, 500.0])
def test_k3_is_finite_and_pulls_back_where_the_policy_lost_a_token(distance, dtype):
    (value,), (gradient,) = k3([distance], dtype)
    assert value.isfinite()
    # Gradient descent raises the policy's logprob, with the slope that k3 has at the bound.
    slope = math.exp(20) - 1
    rounding = 4 * torch.finfo(dtype).eps
    assert gradient.item() == pytest.approx(-slope, rel=rounding)
    expected = math.exp(20) - 1 - 20 + slope * (distance - 20)
    assert value.item() == pytest.approx(expected, rel=rounding)
    # The square of the gradient, of which the gradient norm is made, is finite too.
    assert gradient.square().isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_k3_up_to_the_bound_is_the_plain_formula_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    drawn = 40 * torch.rand(10_000, generator=generator, dtype=torch.float64) - 20
    special = [20.0, 0.0, -0.0, 1e-30, -1e-30, -300.0, -math.inf]
    d = torch.cat([drawn, torch.tensor(special, dtype=torch.float64)]).to(dtype)
    values, gradients = k3(d, dtype)
    policy = (-d).requires_grad_()
    plain = torch.expm1(-policy) + policy
    (plain_gradients,) = torch.autograd.grad(plain.sum(), policy)
    assert torch.equal(values, plain.detach())
    assert torch.equal(gradients, plain_gradients)


def test_k3_under_autocast_is_finite_and_pulls_back():
    policy = torch.tensor([-25.0, -60.0, -500.0, -1.0], requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = kl_estimate(policy, torch.zeros(4), "k3")
        (gradient,) = torch.autograd.grad(value.sum(), policy)
    assert value.dtype == torch.float32, "logprobs are float32, and stay so"
    assert value.isfinite().all()
    assert (gradient < 0).all()


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
