# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sums over the sequences of packed rows, with static shapes.

A row holds several sequences. Their ids are local to the row: 0, 1, ..., below the length of the
row. Numbers of sequences are kept in a [rows, seq] tensor indexed by id, whose shape does not
depend on the number of sequences. A [batch, seq] tensor with one sequence in each row is the
special case of a single id.

Example: for ``values 1 2 3 4`` and ``sequence_ids 0 0 1 1`` the sums are ``3 7 0 0``. Spread over
the tokens again, they are ``3 3 7 7``.
"""

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus or minus this before ``exp``, so that ratios lie in
[2.1e-9, 4.9e8]. Useful clip bounds, importance caps and floors lie far inside of this range, so
that the clamp does not change what they decide. Without it, ``exp`` and the squares in a gradient
norm would overflow float32."""


def ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns ``exp(log_ratio)``, constant outside of plus or minus :data:`LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def held_between(
    values: torch.Tensor, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    """Returns the values, with those below ``low`` and above ``high`` replaced by the bound.

    Unlike ``clamp``, a value at a bound keeps its gradient with every torch: the gradient of ``clamp``
    there is 1 up to torch 2.14, and 0 from 2.15 on. A ratio of exactly 1 is at a bound if the
    bound is 1, which is so for every token of a policy that has not been trained since it sampled.
    """
    if low is not None:
        values = values.masked_fill(values < low, low)
    if high is not None:
        values = values.masked_fill(values > high, high)
    return values


def sequence_sums(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Returns the sum of each sequence's values; values that do not count must be 0.

    Args:
        values: [rows, seq] float.
        sequence_ids: [rows, seq] int64, row-local, from 0 and below ``seq``.

    Returns:
        [rows, seq] indexed by sequence id; 0 for ids that do not occur.
    """
    return torch.zeros_like(values).scatter_add(1, sequence_ids, values)


def spread(per_sequence: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Spreads numbers of sequences over tokens: [rows, seq] by id to [rows, seq] by token."""
    return per_sequence.gather(1, sequence_ids)


def sequence_means(
    values: torch.Tensor, loss_mask: torch.Tensor, sequence_ids: torch.Tensor
) -> torch.Tensor:
    """Returns, at each token, the mean of its sequence's values over the trained tokens.

    Args:
        values: [rows, seq] float, 0 where not trained.
        loss_mask: [rows, seq] bool.
        sequence_ids: [rows, seq] int64.

    Returns:
        [rows, seq] by token; 0 for a sequence without a trained token.
    """
    counts = sequence_sums(loss_mask.to(values.dtype), sequence_ids)
    return spread(sequence_sums(values, sequence_ids) / counts.clamp(min=1.0), sequence_ids)


def sequence_maxima(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Returns, at each token, the largest of its sequence's values.

    Args:
        values: [rows, seq] float, at least 0, and 0 where not trained.
        sequence_ids: [rows, seq] int64.

    Returns:
        [rows, seq] by token.
    """
    largest = torch.zeros_like(values).scatter_reduce(1, sequence_ids, values, "amax")
    return spread(largest, sequence_ids)
