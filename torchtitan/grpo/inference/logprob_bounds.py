# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Between which numbers logprobs lie, wherever they come from: a server, a record, or a kept rollout."""

import numpy as np

LOWEST_SAMPLED_LOGPROB = float(np.log(np.finfo(np.float32).tiny))
"""Bound that the logprob of a sampled token is above, about -87.3 nats, at any temperature.

Samplers draw from a softmax in float32, and logprobs are those after the temperature. A probability
below the smallest normal number is flushed to 0 on GPUs. Where it is not, random numbers of 24 to 64
bits cannot choose it: the noise that they are turned into spans 50 nats at most."""

LOWEST_LOGPROB = -9999.0
"""Bound that the logprob is above of a token that was not sampled, such as in a teacher's rating.

Such a token may be as unlikely as logits can tell. Servers that cannot write minus infinity write
this number in its place (vLLM does), so that logprobs lie above it."""

HIGHEST_LOGPROB = 1e-3
"""How far above 0 rounding may put a logprob of 0, in any precision that a server computes in."""


def first_bad_logprob(values: np.ndarray, lowest: float) -> int | None:
    """Returns the place of the first number that cannot be a logprob, or None if all can be.

    Args:
        values: [tokens] float.
        lowest: :data:`LOWEST_SAMPLED_LOGPROB` or :data:`LOWEST_LOGPROB`.
    """
    bad = np.flatnonzero(~((values > lowest) & (values <= HIGHEST_LOGPROB)))  # NaN is neither
    return int(bad[0]) if bad.size else None


def logprob_rule(lowest: float) -> str:
    """Returns what must hold of a logprob, for messages."""
    return f"must be finite, above {lowest:.5g} and not above 0"
