"""The losses of examples/losses, against numbers worked out by hand."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.policy_function import check_policy_function, policy_function
from torchtitan.grpo.losses.policy_terms import PolicyInputs

Compute = Callable[..., list[list[float]]]


@pytest.fixture
def compute(repository: Path) -> Compute:
    def term_of(name: str, ratios: list[float], advantages: list[float], **settings):
        """The losses of a sequence, and the gradient of their sum."""
        config = GRPO(policy_loss=f"{repository / 'examples/losses/clips.py'}:{name}", **settings)
        check_policy_function(config)
        logprobs = torch.full((1, len(ratios)), -2.0, dtype=torch.float64, requires_grad=True)
        old = logprobs.detach() - torch.tensor([ratios], dtype=torch.float64).log()
        inputs = PolicyInputs(
            logprobs, old, old, torch.tensor([advantages], dtype=torch.float64), torch.zeros_like(old),
            torch.ones_like(old, dtype=torch.bool), torch.zeros_like(old, dtype=torch.int64),
        )  # fmt: skip
        term = policy_function(config.policy_loss)(inputs, config, **config.policy_loss_options)
        (gradient,) = torch.autograd.grad(term.token_losses.sum(), logprobs)
        return [term.token_losses[0].tolist(), gradient[0].tolist()]

    return term_of


def test_dual_clip_bounds_the_loss_of_negative_advantages(compute: Compute):
    options = {"policy_loss_options": {"bound": 3.0}, "clip_high": 0.3}
    losses, gradient = compute("dual_clip", [4, 2.5, 4], [-2, -2, 2], **options)
    assert losses == pytest.approx([6, 5, -2.6])
    assert gradient == pytest.approx([0, 5, 0])


def test_sapo_has_the_ratios_gradient_at_1_and_less_far_away(compute: Compute):
    losses, gradient = compute("sapo", [1, 1, 3, 3], [1, -1, 1, -1])
    gates = [1 / (1 + math.exp(-t * 2)) for t in (1, 1.05)]
    assert losses == pytest.approx([-2, 2 / 1.05, -4 * gates[0], 4 / 1.05 * gates[1]])
    slopes = [4 * 3 * gate * (1 - gate) for gate in gates]
    assert gradient == pytest.approx([-1, 1, -slopes[0], slopes[1]])


def test_gmpo_takes_the_geometric_mean_of_clipped_ratios(compute: Compute):
    bounds = {"clip_low": 0.4, "clip_high": 0.4}
    losses, gradient = compute("gmpo", [4, math.exp(0.2)], [2, 2], **bounds)
    assert losses == pytest.approx([-2 * math.exp(0.3)] * 2)
    assert gradient == pytest.approx([0, -2 * math.exp(0.3)])
    losses, gradient = compute("gmpo", [0.1, math.exp(0.2)], [-2, -2], **bounds)
    assert losses == pytest.approx([2 * math.exp(-0.1)] * 2)
    assert gradient == pytest.approx([0, 2 * math.exp(-0.1)])
    # With a lower bound of 0, each ratio is at a bound until the policy has been trained.
    assert compute("gmpo", [1, 1], [-1, -1], clip_low=0.0)[1] == [1, 1]
