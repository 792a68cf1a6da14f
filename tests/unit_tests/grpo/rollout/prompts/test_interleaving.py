# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.rollout.prompts.mixture import Interleaving
from torchtitan.grpo.rollout.prompts.prompt_stream import EpochOrder

WEIGHT = st.one_of(
    st.integers(1, 1000), st.floats(1e-6, 1e6, allow_nan=False), st.sampled_from([0.1, 0.2, 0.7])
)
WEIGHTS = st.lists(WEIGHT, min_size=1, max_size=6)


def drawn_one_by_one(weights: list[float], num_draws: int) -> list[tuple[int, int]]:
    """The definition: each draw has the smallest key (2 c + 1) / w of all that are left."""
    exact = [Fraction(str(weight)) for weight in weights]
    counts, draws = [0] * len(weights), []
    for _ in range(num_draws):
        keys = [Fraction(2 * count + 1) / w for count, w in zip(counts, exact, strict=True)]
        chosen = keys.index(min(keys))
        draws.append((chosen, counts[chosen]))
        counts[chosen] += 1
    return draws


@given(WEIGHTS)
def test_any_draw_alone_is_what_drawing_one_by_one_gives(weights):
    order = Interleaving(weights)
    assert [tuple(order.at(p)) for p in range(60)] == drawn_one_by_one(weights, 60)


@given(WEIGHTS, st.integers(0, 10**15))
def test_counts_stay_near_the_proportions(weights, position):
    order = Interleaving(weights)
    counts = order.counts(position)
    total = sum(Fraction(str(weight)) for weight in weights)
    assert sum(counts) == position
    for count, weight in zip(counts, weights, strict=True):
        share = Fraction(str(weight)) / total
        assert abs(count - position * share) <= Fraction(1, 2) + len(weights) * share / 2


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([3, 1], "AABA"), ([0.7, 0.3], "ABAAABAABA"), ([2, 2], "AB"), ([0.1, 0.1, 0.2], "CABC")],
)
def test_weights_are_read_as_they_are_written(weights, expected):
    order = Interleaving(weights)
    assert order.period == len(expected)
    for start in (0, 10**9 * order.period):
        found = [order.at(start + p).set for p in range(order.period)]
        assert "".join("ABC"[chosen] for chosen in found) == expected


def test_single_set_is_in_the_order_that_older_checkpoints_know():
    order = EpochOrder(9, seed=5, set_number=0, shuffle=True)
    for epoch in (0, 3, 2):
        expected = np.random.default_rng([5, epoch]).permutation(9).tolist()
        assert [order.row(9 * epoch + i) for i in range(9)] == expected
