# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What upstream's mixture of experts needs on a CPU: three workarounds, in one place.

Routing, dispatch and weights are upstream's own on every device; only what has no kernel
on a CPU is exchanged.
"""

from functools import partial
from typing import Any

import torch
import torchtitan.models.moe.utils as moe_utils
from torchtitan.models.moe.kernels import generate_permute_indices

_histc = torch.histc


def prepare_moe_for_cpu(model_args: Any) -> None:
    """Makes a mixture of experts run on a CPU. To be called before the model is built.

    Args:
        model_args: Upstream's, with ``moe_args``; changed in place.
    """
    # The grouped product computes in bfloat16 whatever the parameters are, which is right
    # for tensor cores and a loss of precision for nothing elsewhere.
    model_args.moe_args.use_grouped_mm = False
    # The permutation of expert parallelism's dispatch is a Triton kernel.
    moe_utils.generate_permute_indices = partial(generate_permute_indices, use_cpu=True)  # pyright: ignore[reportPrivateImportUsage]
    # Tokens are counted by a histogram of int64, for which a CPU has no kernel.
    torch.histc = histogram


def histogram(input: torch.Tensor, bins: int = 100, min: int = 0, max: int = 0) -> torch.Tensor:
    """``torch.histc``, which also counts expert numbers on a CPU.

    Args:
        input: For int64 on a CPU, values from 0 to ``bins - 1``.
        bins: Number of bins.
        min: Left edge of the first bin; 0 for expert numbers.
        max: Right edge of the last bin; ``bins`` for expert numbers.

    Returns:
        [bins], of the input's dtype.
    """
    counts_experts = input.dtype == torch.int64 and (min, max) == (0, bins)
    if input.device.type != "cpu" or not counts_experts:
        return _histc(input, bins=bins, min=min, max=max)
    counts = torch.zeros(bins, dtype=torch.int64)
    return counts.scatter_add_(0, input, torch.ones_like(input))
