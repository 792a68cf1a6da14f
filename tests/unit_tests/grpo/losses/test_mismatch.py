"""Sums over sequences, bounded ratios and mismatch weights against numbers worked out by hand."""

import math

import pytest
import torch

from torchtitan.grpo.losses.mismatch import mismatch_weights
from torchtitan.grpo.losses.sequences import (
    LOG_RATIO_BOUND,
    ratio,
    sequence_means,
    sequence_sums,
    spread,
)

# Sequence 0 has ratios 4 and 1/2 (product 2, geometric mean sqrt 2), sequence 1 has 1/8 and 1
# (1/8, sqrt 1/8); between them a token that is not trained.
RATIOS = [4.0, 0.5, math.nan, 0.125, 1.0]
MASK = torch.tensor([[True, True, False, True, True]])
IDS = torch.tensor([[0, 0, 0, 1, 1]])
ROOT = math.sqrt(2)


def weights_of(**settings):
    settings = {
        "correction": "truncate",
        "level": "token",
        "cap": 2.0,
        "floor": 0.0,
        "veto": 0.0,
    } | settings
    generator = torch.tensor([[-1.0, -2.0, math.nan, -3.0, -4.0]], dtype=torch.float64)
    old = generator + torch.tensor([RATIOS], dtype=torch.float64).log()
    return mismatch_weights(old.requires_grad_(), generator, MASK, IDS, **settings)


@pytest.mark.parametrize(
    ("settings", "weights", "capped", "masked", "vetoed"),
    [
        ({"correction": "none"}, [1, 1, 1, 1], 0, 0, 0),
        ({}, [2, 0.5, 0.125, 1], 1, 0, 0),
        ({"floor": 0.25}, [2, 0.5, 0.25, 1], 2, 0, 0),
        ({"level": "sequence", "cap": 1.5}, [1.5, 1.5, 0.125, 0.125], 2, 0, 0),
        ({"level": "sequence"}, [2, 2, 0.125, 0.125], 0, 0, 0),
        ({"level": "geometric"}, [ROOT, ROOT, ROOT / 4, ROOT / 4], 0, 0, 0),
        ({"correction": "mask"}, [0, 0.5, 0.125, 1], 0, 1, 0),
        ({"correction": "mask", "floor": 0.25}, [0, 0.5, 0, 1], 0, 2, 0),
        ({"correction": "mask", "level": "sequence", "floor": 0.25}, [2, 2, 0, 0], 0, 2, 0),
        ({"correction": "mask", "level": "geometric", "cap": 1.0}, [0, 0, ROOT / 4, ROOT / 4],
         0, 2, 0),
        # The veto looks at tokens whatever the level, and works without a correction.
        ({"correction": "none", "veto": 0.2}, [1, 1, 0, 0], 0, 2, 2),
        ({"veto": 0.2}, [2, 0.5, 0, 0], 1, 2, 2),
        ({"level": "geometric", "veto": 0.2}, [ROOT, ROOT, 0, 0], 0, 2, 2),
        ({"correction": "mask", "veto": 0.2}, [0, 0.5, 0, 0], 0, 3, 2),
        # A token that was capped and then vetoed is left out, not capped.
        ({"veto": 0.6}, [0, 0, 0, 0], 0, 4, 4),
        ({"veto": 0.1}, [2, 0.5, 0.125, 1], 1, 0, 0),
    ],
)  # fmt: skip
def test_weights_are_those_worked_out_by_hand(settings, weights, capped, masked, vetoed):
    got = weights_of(**settings)
    weights = [*weights[:2], 0, *weights[2:]]
    torch.testing.assert_close(got.weights, torch.tensor([weights], dtype=torch.float64))
    assert not got.weights.requires_grad
    assert (got.capped.sum(), got.masked.sum(), got.vetoed.sum()) == (capped, masked, vetoed)
    if settings.get("correction") != "none":
        assert torch.equal(got.ratios, got.weights)


def test_without_a_correction_the_ratios_still_show():
    got = weights_of(correction="none", veto=0.2)
    torch.testing.assert_close(got.ratios, torch.tensor([[4, 0.5, 0, 0, 0]], dtype=torch.float64))


def test_long_sequences_do_not_overflow():
    n = 4096
    gap = torch.tensor([[1.0] * n + [-1.0] * n])
    ids = torch.tensor([[0] * n + [1] * n])
    mask = torch.ones(1, 2 * n, dtype=torch.bool)
    got = mismatch_weights(
        gap, torch.zeros_like(gap), mask, ids,
        correction="truncate", level="sequence", cap=2.0, floor=0.0, veto=0.0,
    )  # fmt: skip
    assert (got.weights[0, :n] == 2).all()
    assert (got.weights[0, n:] < 1e-8).all()


def test_a_veto_may_be_below_where_ratios_are_bounded():
    generator = torch.tensor([[0.0, 0.0]])
    old = torch.tensor([[-30.0, 0.0]])
    got = mismatch_weights(
        old, generator, torch.ones(1, 2).bool(), torch.zeros(1, 2, dtype=torch.int64),
        correction="none", level="token", cap=2.0, floor=0.0, veto=1e-12,
    )  # fmt: skip
    assert got.weights.tolist() == [[0.0, 0.0]]


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match=r"grpo\.mismatch_correction must be .*got 'drop'"):
        weights_of(correction="drop")
    with pytest.raises(ValueError, match=r"grpo\.mismatch_level must be .*got 'batch'"):
        weights_of(level="batch")


PACKED = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
PACKED_IDS = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]])


def test_sums_stay_inside_rows_and_sequences():
    sums = sequence_sums(PACKED, PACKED_IDS)
    torch.testing.assert_close(sums, torch.tensor([[3.0, 7, 0, 0], [5, 6, 15, 0]]))
    torch.testing.assert_close(
        spread(sums, PACKED_IDS), torch.tensor([[3.0, 3, 7, 7], [5, 6, 15, 15]])
    )


def test_means_are_over_trained_tokens():
    mask = torch.tensor([[True, True, False, True], [False, True, True, True]])
    means = sequence_means(torch.where(mask, PACKED, 0.0), mask, PACKED_IDS)
    # The second row's first sequence has no trained token.
    torch.testing.assert_close(means, torch.tensor([[1.5, 1.5, 4, 4], [0, 6, 7.5, 7.5]]))


def test_ratios_are_exact_inside_the_bound_and_constant_outside():
    log_ratio = torch.tensor([-1e9, -19.0, 0.0, 19.0, 1e9], dtype=torch.float64)
    log_ratio.requires_grad_()
    got = ratio(log_ratio)
    expected = [math.exp(x) for x in (-LOG_RATIO_BOUND, -19, 0, 19, LOG_RATIO_BOUND)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    got.sum().backward()
    expected_gradient = torch.tensor(
        [0, expected[1], expected[2], expected[3], 0], dtype=torch.float64
    )
    torch.testing.assert_close(log_ratio.grad, expected_gradient)
