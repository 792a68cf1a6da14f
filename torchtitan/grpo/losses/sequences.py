# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sums over the sequences of packed rows, with static shapes.

A row's sequences have the ids 0, 1, and so on. Values of sequences are kept in a [rows, seq] tensor
indexed by sequence id. A row has no more sequences than tokens, so the shape need not depend on
their number.

Example: for ``values 1 2 3 4`` and ``sequence_ids 0 0 1 1`` the sums are ``3 7 0 0``. Spread over
the tokens again, they are ``3 3 7 7``.
"""

import torch

LOG_RATIO_BOUND = 20.0
"""Bound of absolute log-ratios before ``exp``, so that ratios lie in [2.1e-9, 4.9e8]. Useful clip
bounds, caps and floors lie far inside, so it does not change what they decide. Without it, ``exp``
and the squares in a gradient norm would overflow float32.
"""


def ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns ``exp(log_ratio)``, constant outside of plus or minus :data:`LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def held_between(
    values: torch.Tensor, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    """Clamps the values to at least ``low`` and at most ``high``; a value equal to a bound keeps its gradient.

    The gradient of ``clamp`` at a bound is 1 up to torch 2.14, and 0 from 2.15 on. Values at a bound are
    common: all ratios are exactly 1 if the policy was not trained since it sampled, and a bound may be 1.
    """
    if low is not None:
        values = values.masked_fill(values < low, low)
    if high is not None:
        values = values.masked_fill(values > high, high)
    return values


def sequence_sums(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Returns the sum of each sequence's values, [rows, seq] by id; 0 for ids that do not occur.

    Values [rows, seq] that do not count must be 0. Ids are int64, local to the row, below ``seq``.
    """
    return torch.zeros_like(values).scatter_add(1, sequence_ids, values)


def spread(per_sequence: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Copies each sequence's value to all of its tokens: [rows, seq] by id to [rows, seq] by token."""
    return per_sequence.gather(1, sequence_ids)


def sequence_means(
    values: torch.Tensor, loss_mask: torch.Tensor, sequence_ids: torch.Tensor
) -> torch.Tensor:
    """Returns, at each token, the mean of its sequence's trained values, [rows, seq].

    Values are 0 where not trained. The mean is 0 for a sequence without a trained token.
    """
    counts = sequence_sums(loss_mask.to(values.dtype), sequence_ids)
    return spread(sequence_sums(values, sequence_ids) / counts.clamp(min=1.0), sequence_ids)
