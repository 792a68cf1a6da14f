# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From token losses to one number: the weight of each token.

The loss of an optimizer step is ``sum(weight * token_loss)`` over all its trained tokens,
wherever they are. Weights are computed once, from the lengths of all samples of the step,
so that no way of splitting the tokens over rows, microbatches and ranks can change it. A
token whose loss is masked later (mismatch correction) keeps its place in the denominator.
"""

from typing import Literal

import numpy as np

AggregationKind = Literal["token_mean", "sequence_mean", "constant_length"]


def weight_mass(completion_lengths: np.ndarray, *, kind: AggregationKind) -> int:
    """What :func:`token_weights` divides by, of lengths and constants apart.

    Where the samples of one optimizer step are weighed in parts, each by itself, the weights
    over all of them are those of each part times its fraction of the parts' total mass.

    Args:
        completion_lengths: [samples] int, trained tokens of each sample.
        kind: ``grpo.aggregation``.

    Returns:
        Tokens under ``token_mean``, else samples with at least one token.
    """
    if kind == "token_mean":
        return int(completion_lengths.sum())
    return int(np.count_nonzero(completion_lengths))


def token_weights(
    completion_lengths: np.ndarray, *, kind: AggregationKind, constant_length: int
) -> np.ndarray:
    """Weight of each trained token of each sample of one optimizer step.

    With ``n_i`` trained tokens in sample i, and S samples with at least one::

        token_mean        1 / sum(n)
        sequence_mean     1 / (S * n_i)
        constant_length   1 / (S * constant_length)

    DAPO (https://arxiv.org/abs/2503.14476), GRPO (https://arxiv.org/abs/2402.03300) and
    Dr.GRPO (https://arxiv.org/abs/2503.20783), in this order. A sample without a trained
    token has weight 0 and is not counted in S. No sample gives an empty array.

    Example: lengths 1 and 3 under ``sequence_mean`` give 1/2 and 1/6.

    Args:
        completion_lengths: [samples] int, trained tokens of each sample, at least 0.
        kind: ``grpo.aggregation``.
        constant_length: Divisor of ``constant_length``, at least 1; not used otherwise.

    Returns:
        [samples] float64.

    Raises:
        ValueError: A length is negative, ``constant_length`` is below 1 where it is used,
            or the kind is not known.
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
                    "grpo.aggregation_length or rollout.max_new_tokens."
                )
            denominators = np.full_like(lengths, float(num_sequences * constant_length))
        case _:
            raise ValueError(
                "grpo.aggregation must be token_mean, sequence_mean or constant_length, "
                f"got {kind!r}."
            )
    return has_tokens / denominators
