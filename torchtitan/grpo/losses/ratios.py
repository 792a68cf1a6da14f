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
