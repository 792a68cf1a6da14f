# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The estimator of pass@k against its definition, and against every choice and every outcome."""

import itertools
from math import comb

import pytest

from torchtitan.grpo.rollout.evaluation.pass_at_k import pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_it_is_the_share_of_all_choices_that_contain_a_completion_that_passed(num_samples: int):
    for num_passed in range(num_samples + 1):
        passed = [i < num_passed for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            choices = list(itertools.combinations(passed, k))
            expected = sum(any(choice) for choice in choices) / len(choices)
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, abs=1e-14)


def test_it_is_the_closed_form_where_the_binomials_are_large():
    for num_samples, num_passed, k in ((200, 3, 100), (500, 17, 64), (1000, 1, 999)):
        expected = 1 - comb(num_samples - num_passed, k) / comb(num_samples, k)
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, rel=1e-12)
    assert 0 < pass_at_k(100_000, 1, 1) == pytest.approx(1e-5)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_its_expected_value_is_the_probability_that_one_of_k_passes(probability: float):
    """Over all outcomes of n independent completions; the plug-in estimate is biased."""
    num_samples = 6
    weights = [
        comb(num_samples, c) * probability**c * (1 - probability) ** (num_samples - c)
        for c in range(num_samples + 1)
    ]
    for k in range(1, num_samples + 1):
        true = 1 - (1 - probability) ** k
        mean = sum(w * pass_at_k(num_samples, c, k) for c, w in enumerate(weights))
        assert mean == pytest.approx(true, abs=1e-12)
        if k > 1:
            plugged_in = sum(w * (1 - (1 - c / num_samples) ** k) for c, w in enumerate(weights))
            assert plugged_in < true - 1e-5


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="k must be from 1 to the number of samples, 4, got 5"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="got 0"):
        pass_at_k(4, 1, 0)
    with pytest.raises(ValueError, match="from 0 to 4, got 5"):
        pass_at_k(4, 5, 1)
