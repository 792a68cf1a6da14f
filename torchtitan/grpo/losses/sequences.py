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
