"""Sums over sequences of packed rows, and bounded ratios."""

import math

import torch

from torchtitan.grpo.losses.sequences import (
    LOG_RATIO_BOUND,
    ratio,
    sequence_means,
    sequence_sums,
    spread,
)

VALUES = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
IDS = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]])


def test_sums_stay_inside_rows_and_sequences():
    sums = sequence_sums(VALUES, IDS)
    torch.testing.assert_close(sums, torch.tensor([[3.0, 7, 0, 0], [5, 6, 15, 0]]))
    torch.testing.assert_close(spread(sums, IDS), torch.tensor([[3.0, 3, 7, 7], [5, 6, 15, 15]]))


def test_means_are_over_trained_tokens():
    mask = torch.tensor([[True, True, False, True], [False, True, True, True]])
    means = sequence_means(torch.where(mask, VALUES, 0.0), mask, IDS)
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
