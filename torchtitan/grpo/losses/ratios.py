# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Probability ratios from logprobs."""

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
