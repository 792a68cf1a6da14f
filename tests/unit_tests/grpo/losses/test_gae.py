"""Advantages, targets and losses of a critic, against numbers by hand, verl's, and a plain loop."""

import pytest
import torch

from torchtitan.grpo.losses.gae import (
    estimate_advantages,
    explained_variance,
    find_decisions,
    mean_and_variance,
    moments,
    token_rewards,
    value_loss,
    whitened,
)


def float64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


def ids(*rows: str) -> torch.Tensor:
    return torch.tensor([[int(digit) for digit in row] for row in rows])


def close(found: torch.Tensor, expected, **bounds) -> None:
    wanted = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, wanted, **{"atol": 1e-12, "rtol": 1e-12} | bounds)


def test_the_worked_example_holds():
    decisions = find_decisions(mask("xx"), ids("00"), "token")
    found = estimate_advantages(float64(0, 1), float64(0.5, 0.25), decisions, gamma=1, lam=0.5)
    close(found, [0.125, 0.75])
    close(found + float64(0.5, 0.25), [0.625, 1.0])


def test_tokens_and_turns_are_decisions_that_skip_context_and_end_with_their_sequence():
    #                      a a   a   b b b        c     d
    loss_mask = mask("-xx-x-xxx", "--x-xx---")
    sequence_ids = ids("000001111", "000111222")
    tokens = find_decisions(loss_mask, sequence_ids, "token")
    assert tokens.tokens.tolist() == tokens.begins.tolist() == [1, 2, 4, 6, 7, 8, 11, 13, 14]
    assert tokens.continues.tolist() == [True, True, False, True, True, False, False, True, False]
    assert tokens.lengths().tolist() == [3, 3, 3, 3, 3, 3, 1, 2, 2]

    turns = find_decisions(loss_mask, sequence_ids, "turn")
    assert turns.begins.tolist() == [1, 4, 6, 11, 13]
    assert turns.of_token.tolist() == [0, 0, 1, 2, 2, 2, 3, 4, 4]
    assert turns.continues.tolist() == [True, False, False, False, False]
    assert turns.lengths().tolist() == [2, 2, 1, 1, 1]
    samples = torch.where(sequence_ids == 2, -1, sequence_ids + 2 * torch.tensor([[0], [1]]))
    close(token_rewards(float64(1, 2, 3, 4), samples, turns), [0.0, 1, 2, 3, 4])
    values = torch.arange(18.0).view(2, 9)
    close(turns.sums(values), [3.0, 4, 6 + 7 + 8, 11, 13 + 14])
    close(turns.at_begins(values), [1.0, 4, 6, 11, 13])
    spread = turns.on_tokens(float64(1, 2, 3, 4, 5), loss_mask.shape)
    assert spread.tolist() == [[0, 1, 1, 0, 2, 0, 3, 3, 3], [0, 0, 4, 0, 5, 5, 0, 0, 0]]
    begun = turns.on_begins(float64(1, 2, 3, 4, 5), loss_mask.shape)
    assert begun.tolist() == [[0, 1, 0, 0, 2, 0, 3, 0, 0], [0, 0, 4, 0, 5, 0, 0, 0, 0]]


def test_sequences_that_touch_are_separate_turns():
    turns = find_decisions(mask("xxxx"), ids("0011"), "turn")
    assert turns.begins.tolist() == [0, 2] and not turns.continues.any()


@pytest.mark.parametrize("level", ["token", "turn"])
def test_rows_without_a_trained_token_have_no_decision(level):
    decisions = find_decisions(mask("---"), ids("000"), level)
    assert len(decisions) == 0
    empty = decisions.at_begins(torch.ones(1, 3))
    found = estimate_advantages(empty, empty, decisions, gamma=1.0, lam=0.9)
    assert found.shape == (0,)
    assert whitened(found, moments(found)).shape == found.shape
    assert mean_and_variance(moments(found)) == (0.0, 0.0)


# Printed by verl's compute_gae_advantage_return and masked_whiten (verl/trainer/ppo/core_algos.py at
# commit 012be9d9), in float64, for these two episodes with gamma = 0.97 and lambda = 0.9.
VERL_MASK = ("xx--xx", "xxxx--")
VERL_VALUES = [[0.3, -0.2, 0.7, 0.1, 0.4, 0.9], [0.5, 0.6, -0.1, 0.8, 0.2, 0.0]]
VERL_REWARDS = [[0, -0.05, 0, 0, 0.02, 1.0], [0.1, 0, 0, -0.5, 0, 0]]
VERL_ADVANTAGES = [0.4179374587, 1.0446019, 0.5803, 0.1, -0.6237961981, -0.9230197, -0.2589, -1.3]
VERL_RETURNS = [0.7179374587, 0.8446019, 0.9803, 1.0, -0.1237961981, -0.3230197, -0.3589, -0.5]
VERL_WHITENED = [
    *(0.6717597592020745, 1.4537963184945943, 0.8743776752479224, 0.27499444129739076),
    *(-0.6282562477267147, -1.0016677618695944, -0.17288947014305456, -1.472114714502619),
]  # fmt: skip


def test_the_numbers_are_those_of_verl():
    decisions = find_decisions(mask(*VERL_MASK), ids("000000", "000011"), "token")
    values = decisions.at_begins(torch.tensor(VERL_VALUES, dtype=torch.float64))
    rewards = decisions.sums(torch.tensor(VERL_REWARDS, dtype=torch.float64))
    found = estimate_advantages(rewards, values, decisions, gamma=0.97, lam=0.9)
    close(found, VERL_ADVANTAGES)
    close(found + values, VERL_RETURNS)
    close(whitened(found, moments(found)), VERL_WHITENED)


def test_the_moments_of_parts_of_a_batch_add_up():
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 7
    parts = moments(values[:20]) + moments(values[20:])
    assert mean_and_variance(parts) == pytest.approx((float(values.mean()), float(values.var())))


@pytest.mark.parametrize("center", [1e4, -1e4, 1e6, 1e8])
def test_advantages_far_from_zero_are_whitened_as_those_near_it(center):
    advantages = float64(*[center + 0.5, center - 0.5] * 2)
    mean = mean_and_variance(moments(advantages))[0]
    found = whitened(advantages, moments(advantages, mean), mean)
    close(found, float64(1, -1, 1, -1) * 0.75**0.5, rtol=1e-6)
    equal = torch.full((1000,), center / 3, dtype=torch.float64)
    mean = mean_and_variance(moments(equal))[0]
    assert whitened(equal, moments(equal, mean), mean).abs().max() < 1e-3


def test_small_advantages_far_from_zero_are_whitened_without_a_second_pass():
    advantages = float64(*[1e4 + 0.005, 1e4 - 0.005] * 2)
    expected = float64(1, -1, 1, -1) * 0.005 / (0.005**2 * 4 / 3 + 1e-8) ** 0.5
    close(whitened(advantages, moments(advantages)), expected, rtol=0.01)


def test_the_scan_equals_a_plain_loop_on_random_rows():
    generator = torch.Generator().manual_seed(0)
    loss_mask = torch.rand(5, 40, generator=generator) < 0.7
    sequence_ids = (torch.rand(5, 40, generator=generator) < 0.15).long().cumsum(1)
    for level in ("token", "turn"):
        decisions = find_decisions(loss_mask, sequence_ids, level)
        rewards, values, lam = torch.rand(
            3, len(decisions), dtype=torch.float64, generator=generator
        )
        expected, following, advantage = [], 0.0, 0.0
        for t in reversed(range(len(decisions))):
            goes_on = bool(decisions.continues[t])
            delta = rewards[t] + 0.98 * following * goes_on - values[t]
            advantage = delta + 0.98 * lam[t] * advantage * goes_on
            following = values[t]
            expected.append(advantage)
        found = estimate_advantages(rewards, values, decisions, gamma=0.98, lam=lam)
        close(found, torch.stack(expected[::-1]))


def test_a_lambda_of_one_gives_returns_of_rewards_whatever_the_values():
    """The default of the critic's targets: they do not depend on its own values."""
    decisions = find_decisions(mask("xxx"), ids("000"), "token")
    values = float64(5, -3, 2)
    found = estimate_advantages(float64(0, 0, 1), values, decisions, gamma=1.0, lam=1.0)
    close(found + values, [1.0, 1, 1])


def test_a_turn_is_one_decision_with_the_value_where_it_begins():
    """Two turns of two tokens: rewards 0.25 (as a KL penalty may give) and 1, values 0.5 and 0.75."""
    turns = find_decisions(mask("xx-xx"), ids("00000"), "turn")
    values = turns.at_begins(torch.tensor([[0.5, 9, 9, 0.75, 9]]))
    rewards = turns.sums(torch.tensor([[0.125, 0.125, 0, 0.5, 0.5]]))
    found = estimate_advantages(rewards, values, turns, gamma=0.5, lam=0.5)
    # delta = 0.25 + 0.5 * 0.75 - 0.5 and 1 - 0.75
    close(found, [0.125 + 0.25 * 0.25, 0.25])


def test_advantages_and_targets_may_have_separate_lambdas():
    """VC-PPO's decoupled GAE: by hand for V = 0.5, 0.25 and a reward of 1 at the end."""
    decisions = find_decisions(mask("xx"), ids("00"), "token")
    values, rewards = float64(0.5, 0.25), float64(0, 1)
    of_policy = estimate_advantages(rewards, values, decisions, gamma=1.0, lam=0.0)
    of_critic = estimate_advantages(rewards, values, decisions, gamma=1.0, lam=1.0)
    close(of_policy, [-0.25, 0.75])
    close(of_critic + values, [1.0, 1.0])


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one():
    returns = float64(0, 1, 1, 0, 0.5)
    variances = {
        "perfect": explained_variance(moments(returns - returns), moments(returns)),
        "constant": explained_variance(moments(returns - 0.3), moments(returns)),
        "wrong": explained_variance(moments(returns + returns), moments(returns)),
    }
    assert variances == pytest.approx({"perfect": 1.0, "constant": 0.0, "wrong": -3.0})
    equal = torch.full((7,), 0.1, dtype=torch.float64)
    assert explained_variance(moments(equal - returns[:1]), moments(equal)) == 0.0


def test_the_value_loss_has_the_numbers_of_a_hand_computation():
    values, old, returns = (
        torch.tensor([row], dtype=torch.float64)
        for row in ([1.0, 0.0, 0.5, 7.0], [0.5, 0.0, 0.45, 7.0], [0.0, 1.0, 0.0, torch.nan])
    )
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    # Unclipped squares 1, 1, 0.25. Clipped by 0.1, the first value is 0.6, and 1 is larger than 0.36.
    loss, is_clipped = value_loss(values, old, returns, weights, 0.1)
    close(loss, 0.5 * (0.5 * 1 + 0.25 * 1 + 0.25 * 0.25))
    assert not is_clipped.any()
    # Towards its return, the value may not gain from more than the clip: 0.6 is farther away than 0.
    values[0, 0] = 0.0
    loss, is_clipped = value_loss(values, old, returns, weights, 0.1)
    close(loss, 0.5 * (0.5 * 0.16 + 0.25 * 1 + 0.25 * 0.25))
    assert is_clipped.tolist() == [[True, False, False, False]]
    loss, is_clipped = value_loss(values, old, returns, weights, 0.0)
    close(loss, 0.5 * (0.25 * 1 + 0.25 * 0.25))
    assert not is_clipped.any()


def test_the_value_loss_has_the_gradient_of_finite_differences():
    generator = torch.Generator().manual_seed(1)
    values, old, returns, weights = torch.rand(4, 3, 8, dtype=torch.float64, generator=generator)
    weights[0, :3] = 0.0
    values.requires_grad_()
    for clip in (0.0, 0.2):
        # Some are held by the clip, whose gradient is 0, and some are not.
        _, is_clipped = value_loss(values, old, returns, weights, clip)
        assert bool(is_clipped.any()) == (clip > 0) and not is_clipped.all()
        torch.autograd.gradcheck(
            lambda given, clip=clip: value_loss(given, old, returns, weights, clip)[0], values
        )


def test_the_value_loss_leaves_other_tokens_without_a_gradient():
    values = torch.tensor([[0.5, torch.inf]], requires_grad=True)
    weights = torch.tensor([[1.0, 0.0]])
    loss, _ = value_loss(values, torch.zeros(1, 2), torch.zeros(1, 2), weights, 0.2)
    loss.backward()
    assert values.grad is not None and values.grad.tolist() == [[0.5, 0.0]]
