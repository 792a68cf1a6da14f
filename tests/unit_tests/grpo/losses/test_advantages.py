"""Shaped rewards, advantages and token weights against numbers worked out by hand."""

import math

import numpy as np
import pytest

from torchtitan.grpo.losses.advantages import (
    are_equal,
    compute_advantages,
    informative_samples,
    num_equal_groups,
    shape_rewards,
)
from torchtitan.grpo.losses.aggregation import token_weights

# Groups out of order: 7 has rewards 1, 3 (mean 2), 3 has 0, 0, 3 (mean 1).
REWARDS = np.array([1.0, 0.0, 3.0, 0.0, 3.0])
GROUPS = np.array([7, 3, 7, 3, 3])


def advantages(rewards=REWARDS, groups=GROUPS, **settings):
    settings = {"kind": "group_norm", "eps": 1e-12} | settings
    return compute_advantages(np.asarray(rewards), np.asarray(groups), **settings)


R2, R3 = math.sqrt(2), math.sqrt(3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Variances: (1 + 1) / 1 = 2 and (1 + 1 + 4) / 2 = 3.
        ({"kind": "group_norm"}, [-1 / R2, -1 / R3, 1 / R2, -1 / R3, 2 / R3]),
        # eps is added to the deviation, not to the variance.
        ({"kind": "group_norm", "eps": 1.0},
         [-1 / (R2 + 1), -1 / (R3 + 1), 1 / (R2 + 1), -1 / (R3 + 1), 2 / (R3 + 1)]),
        ({"kind": "group_mean"}, [-1, -1, 1, -1, 2]),
        # Less the mean of the others: 1 - 3, 0 - 1.5, 3 - 1, 0 - 1.5, 3 - 0.
        ({"kind": "leave_one_out"}, [-2, -1.5, 2, -1.5, 3]),
        # Squares of the centered rewards sum to 1 + 1 + 1 + 1 + 4 = 8: over 4.
        ({"kind": "batch_norm"}, np.array([-1, -1, 1, -1, 2]) / R2),
        # Means 2 and 1; eps is added to the mean.
        ({"kind": "max_rl"}, [-1 / 2, -1, 1 / 2, -1, 2]),
        ({"kind": "max_rl", "eps": 1.0}, [-1 / 3, -1 / 2, 1 / 3, -1 / 2, 1]),
    ],
)  # fmt: skip
def test_advantages_are_those_worked_out_by_hand(settings, expected):
    got = advantages(**settings)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "kind", ["group_norm", "group_mean", "leave_one_out", "batch_norm", "max_rl"]
)
def test_what_cannot_be_compared_gets_exactly_zero(kind):
    # 0.1 three times has a mean of 0.10000000000000002 in floating point.
    rewards, groups = [5.0, 0.1, 0.1, 0.1, 0.0, 1.0], [1, 2, 2, 2, 3, 3]
    got = advantages(rewards, groups, kind=kind, eps=1e-30)
    np.testing.assert_array_equal(got[:4], 0)
    assert (got[4:] != 0).all()
    np.testing.assert_array_equal(advantages([2.0, 2.0], [1, 1], kind=kind), [0, 0])
    np.testing.assert_array_equal(advantages([2.0], [1], kind=kind), [0])
    assert advantages([], [], kind=kind).shape == (0,)


def test_batch_norm_compares_groups_of_one_with_the_batch():
    # Rewards 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7.
    got = advantages([1.0, 2.0, 6.0], [4, 5, 6], kind="batch_norm")
    np.testing.assert_allclose(got, np.array([-2, -1, 3]) / math.sqrt(7), rtol=1e-6)


def test_samples_are_informative_where_rewards_of_their_group_differ():
    got = informative_samples(
        np.array([1.0, 0.5, 0.0, 0.5, 0.0, 9.0]), np.array([2, 1, 2, 1, 2, 7])
    )
    np.testing.assert_array_equal(got, [True, False, True, False, True, False])
    assert informative_samples(np.array([]), np.array([], np.int64)).shape == (0,)


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3, 0.3, 0.3], [float(np.float32(0.7)), 0.7, 0.7], [0.1 + 0.2 - 0.3, 0.0, 0.0], [1e6 * (0.1 + 0.2), 3e5],
        [-0.1 - 0.2, -0.3], [1.1 * 1.1, 1.21], [1e12 * 1.1 / 3, 1.1e12 / 3], [float(np.float32(0.1) * 3), 0.3],
        [sum([0.1] * 10), 1.0],
    ],
)  # fmt: skip
def test_rewards_that_are_equal_up_to_rounding_are_equal(rewards):
    groups = np.zeros(len(rewards), np.int64)
    assert are_equal(np.array(rewards))
    assert num_equal_groups(np.array(rewards), groups) == 1
    np.testing.assert_array_equal(advantages(rewards, groups, eps=1e-30), 0)
    assert informative_samples(np.array([*rewards, 7.0]), np.array([*groups, 0])).all()


@pytest.mark.parametrize(
    "rewards",
    [[1.0, 1.00001], [1e6, 1e6 + 1], [0.0, 1e-9], [1e4 - 0.005, 1e4 + 0.005], [-1.0, 1.0]],
)
def test_small_differences_that_are_no_rounding_count(rewards):
    assert not are_equal(np.array(rewards))


def test_max_rl_weights_successes_by_one_over_their_rate():
    """As the gradient of the log-likelihood: the successes of a group weigh 1 together."""
    got = advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], kind="max_rl")
    np.testing.assert_allclose(got + 1, [4, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("nothing", [0.3 - 0.1 - 0.2, float(np.float32(0.3)) - 0.1 - 0.2 - 2e-8])
def test_max_rl_takes_what_is_below_0_by_rounding_for_0(nothing):
    assert nothing < 0
    got = advantages([nothing, 0.0, 1.0, nothing, 0.0, 0.0], [0, 0, 0, 1, 1, 1], kind="max_rl")
    np.testing.assert_allclose(got, [-1, -1, 2, 0, 0, 0], atol=1e-5)


def test_groups_with_equal_rewards_are_counted():
    rewards = np.array([1.0, 1.0, 0.0, 1.0, 0.5, 0.5])
    assert num_equal_groups(rewards, np.array([0, 0, 1, 1, 2, 2])) == 2
    assert num_equal_groups(np.zeros(0), np.zeros(0, np.int64)) == 0
    # With groups of one sample, `batch_norm` compares the samples of the batch.
    assert num_equal_groups(np.array([1.0, 1.0, 1.0]), np.arange(3)) == 3
    assert num_equal_groups(np.array([1.0, 1.0, 0.0]), np.arange(3)) == 0


def shaped(rewards, lengths, **settings):
    settings = {"overlong_buffer": 0, "overlong_penalty": 1.0, "max_new_tokens": 10} | settings
    return shape_rewards(np.array(rewards), np.array(lengths), **settings)


def test_rewards_lose_what_is_overlong():
    # Buffer of 4 before 10 tokens; what is longer than 10 (a lower limit since) loses no more.
    got = shaped([1.0] * 6, [1, 6, 7, 8, 10, 12], overlong_buffer=4, overlong_penalty=0.8)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, [1, 1, 0.8, 0.6, 0.2, 0.2])
    np.testing.assert_array_equal(shaped([1.0, 1.0], [9, 10], overlong_penalty=5.0), [1, 1])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [1 / 10, 0, 1 / 10, 1 / 10]),
        # Three sequences have tokens; the one without is not counted.
        ("sequence_mean", [1 / 3, 0, 1 / 12, 1 / 15]),
        ("constant_length", [1 / 24, 0, 1 / 24, 1 / 24]),
    ],
)
def test_token_weights_are_those_worked_out_by_hand(kind, expected):
    got = token_weights(np.array([1, 0, 4, 5]), kind=kind, constant_length=8)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    np.testing.assert_array_equal(token_weights(np.array([0, 0]), kind=kind, constant_length=8), 0)
    assert token_weights(np.array([]), kind=kind, constant_length=8).shape == (0,)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: advantages([1.0, math.nan], [1, 1]), r"finite, got \[nan\]"),
        (lambda: advantages([1.0, 2.0], [1, 1, 1]), "must match"),
        (lambda: advantages([-0.5, 1.0], [0, 0], kind="max_rl"), r"max_rl.* at least 0, got -0\.5"),
        (lambda: advantages([-1e-5, 1.0], [0, 0], kind="max_rl"), r"at least 0, got -1e-05"),
        (lambda: shaped([math.inf], [1]), r"finite, got \[inf\]"),
        (lambda: shaped([1.0], [1, 2]), "must match"),
        (lambda: token_weights(np.array([-1]), kind="token_mean", constant_length=8),
         "at least 0, got -1"),
        (lambda: token_weights(np.array([1]), kind="constant_length", constant_length=0),
         r"at least 1, got 0\. Set rollout\.max_new_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()
