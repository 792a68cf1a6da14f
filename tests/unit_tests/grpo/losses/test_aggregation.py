"""Token weights against numbers worked out by hand."""

import numpy as np
import pytest

from torchtitan.grpo.losses.aggregation import token_weights


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [1 / 10, 0, 1 / 10, 1 / 10]),
        # Three sequences have tokens; the one without is not counted.
        ("sequence_mean", [1 / 3, 0, 1 / 12, 1 / 15]),
        ("constant_length", [1 / 24, 0, 1 / 24, 1 / 24]),
    ],
)
def test_weights_are_those_worked_out_by_hand(kind, expected):
    got = token_weights(np.array([1, 0, 4, 5]), kind=kind, constant_length=8)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant_length"])
def test_nothing_to_train_on_weighs_nothing(kind):
    got = token_weights(np.array([0, 0]), kind=kind, constant_length=8)
    np.testing.assert_array_equal(got, [0, 0])
    assert token_weights(np.array([]), kind=kind, constant_length=8).shape == (0,)


def test_what_cannot_be_weighed_is_refused():
    with pytest.raises(ValueError, match=r"at least 0, got -1"):
        token_weights(np.array([-1]), kind="token_mean", constant_length=8)
    with pytest.raises(ValueError, match=r"at least 1, got 0\. Set grpo\.aggregation_length"):
        token_weights(np.array([1]), kind="constant_length", constant_length=0)
    with pytest.raises(ValueError, match=r"grpo\.aggregation must be .*got 'sum'"):
        token_weights(np.array([1]), kind="sum", constant_length=8)  # pyright: ignore
