# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Three workarounds that let upstream's mixture of experts run on a CPU.

Routing, dispatch and weights are upstream's own on every device. Only operations that have no
CPU kernel are replaced.
"""

from functools import partial
from typing import Any

import torch

from torchtitan.grpo.upstream.models import generate_permute_indices, moe_utils

_histc = torch.histc


def prepare_moe_for_cpu(model_args: Any) -> None:
    """Makes a mixture of experts run on a CPU. It must be called before the model is built.

    Args:
        model_args: Upstream's model arguments with ``moe_args``; changed in place.
    """
    # The grouped product always computes in bfloat16. That suits tensor cores; on a CPU it
    # would lose precision without any gain.
    model_args.moe_args.use_grouped_mm = False
    # By default, a Triton kernel computes the permutation of expert parallelism's dispatch.
    moe_utils.generate_permute_indices = partial(generate_permute_indices, use_cpu=True)  # pyright: ignore[reportPrivateImportUsage]
    # Upstream counts tokens with a histogram of int64, which has no CPU kernel.
    torch.histc = histogram


def histogram(input: torch.Tensor, bins: int = 100, min: int = 0, max: int = 0) -> torch.Tensor:
    """Computes ``torch.histc``, and counts int64 expert numbers on a CPU as well.

    Args:
        input: Values to count. int64 values on a CPU must lie between 0 and ``bins - 1``.
        bins: Number of bins.
        min: Left edge of the first bin; 0 for expert numbers.
        max: Right edge of the last bin; ``bins`` for expert numbers.

    Returns:
        [bins] counts, in the dtype of ``input``.
    """
    counts_experts = input.dtype == torch.int64 and (min, max) == (0, bins)
    if input.device.type != "cpu" or not counts_experts:
        return _histc(input, bins=bins, min=min, max=max)
    counts = torch.zeros(bins, dtype=torch.int64)
    return counts.scatter_add_(0, input, torch.ones_like(input))
