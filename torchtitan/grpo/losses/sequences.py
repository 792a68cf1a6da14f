# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sums over the sequences of packed rows, with static shapes.

A row holds several sequences, told apart by row-local ids 0, 1, ... that stay below the
row's length. What belongs to a sequence is kept in a [rows, seq] tensor, indexed by id,
so that nothing depends on how many sequences there are. A [batch, seq] tensor with one
sequence a row is the case of a single id.

Example: ``values 1 2 3 4``, ``sequence_ids 0 0 1 1``: the sums are ``3 7 0 0``, and spread
over the tokens again ``3 3 7 7``.
"""

import torch


def sequence_sums(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Sum of each sequence's values, which are 0 where they do not count.

    Args:
        values: [rows, seq] float.
        sequence_ids: [rows, seq] int64, row-local, from 0 and below ``seq``.

    Returns:
        [rows, seq] indexed by sequence id; 0 for ids that do not occur.
    """
    return torch.zeros_like(values).scatter_add(1, sequence_ids, values)


def spread(per_sequence: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Each token's sequence's value: [rows, seq] by id to [rows, seq] by token."""
    return per_sequence.gather(1, sequence_ids)


def sequence_means(
    values: torch.Tensor, loss_mask: torch.Tensor, sequence_ids: torch.Tensor
) -> torch.Tensor:
    """Mean of each sequence's values over its trained tokens, at each of its tokens.

    Args:
        values: [rows, seq] float, 0 where not trained.
        loss_mask: [rows, seq] bool.
        sequence_ids: [rows, seq] int64.

    Returns:
        [rows, seq] by token; 0 for a sequence without a trained token.
    """
    counts = sequence_sums(loss_mask.to(values.dtype), sequence_ids)
    return spread(sequence_sums(values, sequence_ids) / counts.clamp(min=1.0), sequence_ids)
