"""Sums over sequences, bounded ratios, and the mismatch weights that are made of them."""

import math

import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.mismatch import mismatch_weights, rejected_sequences
from torchtitan.grpo.losses.sequences import LOG_RATIO_BOUND, ratio

RATIOS = torch.tensor([[4.0, 0.5, 1.0, 0.125, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False, True, True]])
IDS = torch.tensor([[0, 0, 0, 1, 1]])
GENERATOR = torch.tensor([[-1.0, -2.0, 0.0, -3.0, -4.0]], dtype=torch.float64)
TRAINER = GENERATOR + RATIOS.log()


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, [2, 0.5, 0, 0.125, 1]),
        # Of the sequences: products 2 and 1/8, and their square roots.
        ({"mismatch_level": "sequence", "importance_cap": 1.5}, [1.5, 1.5, 0, 0.125, 0.125]),
        ({"mismatch_level": "geometric"}, [2**0.5, 2**0.5, 0, 8**-0.5, 8**-0.5]),
        # k3 is (2.5 - log 2) / 2 = 0.903 and (log 8 - 7/8) / 2 = 0.602.
        ({"mismatch_max_k3": 0.91}, [2, 0.5, 0, 0.125, 1]),
        ({"mismatch_max_k3": 0.9}, [0, 0, 0, 0.125, 1]),
        ({"mismatch_max_k3": 0.6}, [0, 0, 0, 0, 0]),
    ],
)
def test_weights_are_those_worked_out_by_hand(settings, weights):
    got = mismatch_weights(TRAINER, GENERATOR, MASK, IDS, GRPO(**settings)).weights
    assert got[0].tolist() == pytest.approx(weights)


def test_long_sequences_do_not_overflow():
    n = 4096
    gap, ids = torch.tensor([[1.0] * n + [-1.0] * n]), torch.tensor([[0] * n + [1] * n])
    config = GRPO(mismatch_level="sequence")
    got = mismatch_weights(gap, torch.zeros_like(gap), ids >= 0, ids, config).weights[0]
    assert (got[:n] == 2).all() and (got[n:] < 1e-8).all()


def test_ratios_are_exact_inside_the_bound_and_constant_outside():
    log_ratio = torch.tensor([-1e9, -19.0, 0.0, 19.0, 1e9], dtype=torch.float64).requires_grad_()
    got = ratio(log_ratio)
    expected = [math.exp(x) for x in (-LOG_RATIO_BOUND, -19, 0, 19, LOG_RATIO_BOUND)]
    assert got.tolist() == pytest.approx(expected)
    got.sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([0, *expected[1:4], 0])  # pyright: ignore


def test_a_ratio_far_beyond_the_range_of_floats_is_rejected():
    trainer, ids = torch.tensor([[-300.0, 0.0]]), torch.zeros(1, 2, dtype=torch.int64)
    config = GRPO(mismatch_max_k3=20.0)
    assert rejected_sequences(trainer, ids == 0, ids, config).all()
