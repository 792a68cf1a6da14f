# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Probability ratios from logprobs."""

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are held within this before ``exp``: ratios in [2.1e-9, 4.9e8]. Clip bounds,
importance caps and floors of any use lie far inside, so nothing that they decide changes;
beyond it, ``exp`` and the squares of a gradient norm would overflow float32."""


def ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp(log_ratio)``, constant outside of +-:data:`LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
