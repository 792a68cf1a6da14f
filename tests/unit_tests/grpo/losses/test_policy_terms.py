"""Policy terms against numbers worked out by hand."""

import math

import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.policy_terms import (
    BUILTIN,
    CLIPPED,
    DUAL_CLIPPED,
    PolicyInputs,
    PolicyTerm,
)


def term_of(
    ratios: list[float], advantages: list[float], ids: list[int] | None = None, **settings
) -> tuple[PolicyTerm, torch.Tensor]:
    """The term of one row of trained tokens, and the gradient of its sum.

    Logprobs are all -2, so that what the ratio is of does not matter elsewhere.
    """
    config = GRPO(**({"clip_low": 0.2, "clip_high": 0.3} | settings))
    logprobs = torch.full((1, len(ratios)), -2.0, dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - torch.tensor([ratios], dtype=torch.float64).log()
    inputs = PolicyInputs(
        logprobs=logprobs,
        old_logprobs=old,
        generator_logprobs=torch.full_like(old, math.nan),
        advantages=torch.tensor([advantages], dtype=torch.float64),
        entropy=torch.zeros_like(old),
        loss_mask=torch.ones_like(old, dtype=torch.bool),
        sequence_ids=torch.tensor([ids or [0] * len(ratios)]),
    )
    term = BUILTIN[config.policy_loss](inputs, config)
    (gradient,) = torch.autograd.grad(term.token_losses.sum(), logprobs)
    return term, gradient


E = math.e
HIGH, LOW = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))  # sigmoids of 1 and -1
# For each case: ratios, advantages, further settings, and what they give.
CASES = {
    # d(-ratio * A) = -ratio * A where not clipped, else 0.
    "clip": ([2, 2, 0.5, 0.5, 1.1], [1, -1, 1, -1, 3], {}, [-1.3, 2, -0.5, 0.8, -3.3],
             [0, 2, -0.5, 0, -3.3], [1, 0, 0, 1, 0], [0] * 5),
    "at the old policy": ([1, 1, 1], [1, -2, 0], {}, [-1, 2, 0], [-1, 2, 0], [0] * 3, [0] * 3),
    "reinforce": ([1, 1, 1], [1, -2, 0], {"policy_loss": "reinforce"}, [2, -4, 0], [-1, 2, 0],
                  [0] * 3, [0] * 3),
    "dual clip": ([4, 2.5, 4, 0.5], [-2, -2, 2, -2], {"dual_clip": 3.0}, [6, 5, -2.6, 1.6],
                  [0, 5, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]),
    # Geometric means: sqrt(4 * 1) = 2, clipped to 1.3; sqrt(1.44 * 1) = 1.2, not clipped.
    # The tokens of a sequence share its gradient evenly.
    "gspo": ([4, 1, 1.44, 1], [1, 1, 5, 5], {"policy_loss": "gspo", "ids": [0, 0, 1, 1]},
             [-1.3, -1.3, -6, -6], [0, 0, -6, -6], [1, 1, 0, 0], [0] * 4),
    "gspo, dual clip": ([16, 1], [-1, -1], {"policy_loss": "gspo", "dual_clip": 3.0}, [3, 3],
                        [0, 0], [0, 0], [1, 1]),
    # Loss: -weight * A * logprob with logprob -2; gradient: -weight * A.
    "cispo": ([2, 0.5, 1.1], [1, -1, 1], {"policy_loss": "cispo"}, [2.6, -1, 2.2],
              [-1.3, 0.5, -1.1], [1, 0, 0], [0] * 3),
    "cispo, two-sided": ([2, 0.5, 1.1], [1, -1, 1], {"policy_loss": "cispo", "cispo_two_sided": True},
                         [2.6, -1.6, 2.2], [-1.3, 0.8, -1.1], [1, 1, 0], [0] * 3),
    # 4 / t * sigmoid(t * (r - 1)) * A; its derivative by the logprob is 4 s (1 - s) r A.
    "sapo": ([1, 2, 1, 0.5], [1, 1, -1, -1],
             {"policy_loss": "sapo", "sapo_temperature_negative": 2.0}, [-2, -4 * HIGH, 1, 2 * LOW],
             [-1, -4 * HIGH * (1 - HIGH) * 2, 1, 4 * LOW * (1 - LOW) * 0.5], [0] * 4, [0] * 4),
    # A > 0: e^1.5 is clipped to e^0.5 and e^-0.7 stays, so the mean is e^-0.1. A < 0: e^-1.5 is
    # clipped to e^-0.5 and e^0.7 stays, so the mean is e^0.1. A clipped token has no gradient.
    "gmpo": ([E**1.5, E**-0.7, E**-1.5, E**0.7], [1, 1, -1, -1],
             {"policy_loss": "gmpo", "clip_low": 0.5, "clip_high": 0.5, "ids": [0, 0, 1, 1]},
             [-(E**-0.1)] * 2 + [E**0.1] * 2, [0, -(E**-0.1), 0, E**0.1], [1, 0, 1, 0], [0] * 4),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_worked_out_by_hand(case):
    ratios, advantages, settings, losses, gradient, clipped, dual_clipped = CASES[case]
    term, got = term_of(ratios, advantages, **settings)
    torch.testing.assert_close(
        term.token_losses.detach(), torch.tensor([losses], dtype=torch.float64)
    )
    torch.testing.assert_close(got, torch.tensor([gradient], dtype=torch.float64))
    for name, expected in ((CLIPPED, clipped), (DUAL_CLIPPED, dual_clipped)):
        # A term that never clips says nothing about it.
        values = term.metrics[name].values.tolist() if name in term.metrics else [[0] * len(losses)]
        assert values == [[bool(x) for x in expected]], name
    assert all(metric.reduction == "mean" for metric in term.metrics.values())


@pytest.mark.parametrize("name", ["clip", "gspo", "gmpo"])
def test_a_ratio_at_its_bound_is_not_clipped(name):
    """With a lower bound of 1, each ratio is at a bound until the policy has been trained."""
    _, gradient = term_of([1, 1], [2, -1], ids=[0, 1], policy_loss=name, clip_low=0.0)
    assert gradient.tolist() == [[-2, 1]]


def test_gspo_passes_no_gradient_to_tokens_that_are_weighted_out():
    """GSPO-token: in the sequence form the first token would get half of it."""
    config = GRPO(policy_loss="gspo")
    logprobs = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    same = torch.zeros(1, 2, dtype=torch.float64)
    inputs = PolicyInputs(
        logprobs, same, same, torch.ones_like(same), same, torch.ones(1, 2).bool(),
        torch.zeros(1, 2, dtype=torch.int64),
    )  # fmt: skip
    losses = BUILTIN["gspo"](inputs, config).token_losses
    (gradient,) = torch.autograd.grad((losses * torch.tensor([[0.0, 1.0]])).sum(), logprobs)
    assert gradient.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("name", BUILTIN)
def test_tokens_without_an_advantage_get_no_gradient(name):
    _, gradient = term_of([3, 0.3, 1], [0, 0, 0], policy_loss=name)
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", ["sapo", "gmpo"])
def test_gradients_are_finite_differences(name):
    ratios, advantages = [0.6, 1.3, 2.0, 0.8, 1.1], [1.0, 1.0, 1.0, -0.7, -0.7]
    ids, step = [0, 0, 0, 1, 1], 1e-6
    _, gradient = term_of(ratios, advantages, ids, policy_loss=name)

    def total(index: int, by: float) -> float:
        moved = [r * math.exp(by) if i == index else r for i, r in enumerate(ratios)]
        return term_of(moved, advantages, ids, policy_loss=name)[0].token_losses.sum().item()

    for index in range(len(ratios)):
        difference = (total(index, step) - total(index, -step)) / (2 * step)
        assert gradient[0, index].item() == pytest.approx(difference, rel=1e-5, abs=1e-8)
