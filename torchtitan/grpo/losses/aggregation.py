# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The weights with which the losses of tokens are summed into one number.

The loss of an optimizer step is ``sum(weight * token_loss)`` over all trained tokens on all ranks.
The weights come from the lengths of all samples of the step, so the loss does not depend on rows,
microbatches and ranks. A token that the mismatch correction masks still counts in the denominator.
"""

from typing import Literal

import numpy as np

AggregationKind = Literal["token_mean", "sequence_mean", "constant_length"]


def weight_mass(completion_lengths: np.ndarray, *, kind: AggregationKind) -> int:
    """Returns the divisor of :func:`token_weights`: trained tokens, or samples with at least one.

    If parts of a step are weighted separately, each part's weights must be multiplied by the part's
    fraction of the total mass, to get the weights for the whole step.
    """
    if kind == "token_mean":
        return int(completion_lengths.sum())
    return int(np.count_nonzero(completion_lengths))


def token_weights(
    completion_lengths: np.ndarray, *, kind: AggregationKind, constant_length: int
) -> np.ndarray:
    """Returns the weight of each trained token of an optimizer step's samples, [samples] float64.

    With ``n_i`` trained tokens in sample i, and S samples with at least one::

        token_mean        1 / sum(n)
        sequence_mean     1 / (S * n_i)
        constant_length   1 / (S * constant_length)

    These are the weights of DAPO (https://arxiv.org/abs/2503.14476), GRPO (https://arxiv.org/abs/2402.03300)
    and Dr.GRPO (https://arxiv.org/abs/2503.20783). A sample without a trained token has weight 0 and
    does not count in S. Example: lengths 1 and 3 under ``sequence_mean`` give 1/2 and 1/6.

    Raises ValueError if a length is negative, or ``constant_length`` is used and below 1.
    """
    lengths = np.asarray(completion_lengths, np.float64)
    if (lengths < 0).any():
        raise ValueError(f"completion_lengths must be at least 0, got {lengths.min():.0f}.")
    has_tokens = lengths > 0
    num_sequences = max(int(has_tokens.sum()), 1)
    match kind:
        case "token_mean":
            denominators = np.full_like(lengths, max(lengths.sum(), 1.0))
        case "sequence_mean":
            denominators = num_sequences * np.maximum(lengths, 1.0)
        case "constant_length":
            if constant_length < 1:
                raise ValueError(
                    f"constant_length must be at least 1, got {constant_length}. Set "
                    "rollout.max_new_tokens."
                )
            denominators = np.full_like(lengths, float(num_sequences * constant_length))
    return has_tokens / denominators
