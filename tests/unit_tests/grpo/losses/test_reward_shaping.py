"""Shaped rewards against numbers worked out by hand."""

import math

import numpy as np
import pytest

from torchtitan.grpo.losses.advantages import shape_rewards


def shaped(rewards, lengths, **settings):
    settings = {
        "positive_scale": 1.0,
        "negative_scale": 1.0,
        "overlong_buffer": 0,
        "overlong_penalty": 1.0,
        "max_new_tokens": 10,
    } | settings
    return shape_rewards(np.array(rewards), np.array(lengths), **settings)


def test_rewards_are_scaled_by_their_sign():
    got = shaped([2.0, 0.0, -3.0], [1, 1, 1], positive_scale=0.5, negative_scale=2.0)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [1, 0, -6])


def test_overlong_penalty_grows_over_the_buffer():
    # Buffer of 4 before 10 tokens; what is longer than 10 (a lower limit since) loses no more.
    got = shaped([1.0] * 6, [1, 6, 7, 8, 10, 12], overlong_buffer=4, overlong_penalty=0.8)
    np.testing.assert_allclose(got, [1, 1, 0.8, 0.6, 0.2, 0.2])


def test_without_a_buffer_nothing_is_taken_off():
    np.testing.assert_array_equal(shaped([1.0, 1.0], [9, 10], overlong_penalty=5.0), [1, 1])


def test_the_penalty_is_not_scaled_with_the_reward():
    got = shaped([1.0], [10], positive_scale=3.0, overlong_buffer=2)
    np.testing.assert_array_equal(got, [2])


def test_rewards_that_are_not_finite_or_do_not_match_are_refused():
    with pytest.raises(ValueError, match=r"finite, got \[inf\]"):
        shaped([math.inf], [1])
    with pytest.raises(ValueError, match="must match"):
        shaped([1.0], [1, 2])
