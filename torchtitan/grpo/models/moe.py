# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Corrections of upstream's mixture of experts: gradients under tensor parallelism, and CPUs.

Each tensor-parallel rank computes a partial sum over hidden units, or some of the tokens. The
gradient of the router's scores is therefore partial too, but upstream treats it as complete,
and so trains the router differently on different ranks. Hooks around upstream's modules sum it.
"""

from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchtitan.grpo.upstream.models import generate_permute_indices, moe_utils


def sum_moe_gradients(model: nn.Module, mesh: DeviceMesh, *, splits_tokens: bool) -> None:
    """Completes the gradients of every mixture of experts, after upstream has sharded the model.

    With ``splits_tokens``, ranks send different tokens to the experts. Otherwise each computes a
    part of each token's output.
    """

    def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
        """Identity whose gradient becomes the sum over the mesh's ranks."""
        replicated = DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)
        return replicated.to_local(grad_placements=(Partial(),))

    def before_moe(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return sum_over_ranks(inputs[0])

    def before_gate(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        # This gradient is complete already, but is about to be summed with the experts' part.
        return _DivideGradient.apply(inputs[0], mesh.size())  # pyright: ignore[reportReturnType]

    def after_gate(_: nn.Module, __: tuple[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(scores)

    blocks: list[Any] = list(model.layers.values())  # pyright: ignore
    for block in blocks:
        if not block.moe_enabled:
            continue
        # Registered last, so that it sees the plain tensor that upstream's own hook returns.
        block.moe.router.gate.register_forward_hook(after_gate)
        if splits_tokens:
            block.moe.register_forward_pre_hook(before_moe)
            block.moe.router.gate.register_forward_pre_hook(before_gate, prepend=True)


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
        ctx.num_ranks = num_ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] / ctx.num_ranks, None


_histc = torch.histc


def prepare_moe_for_cpu(model_args: Any) -> None:
    """Replaces the operations that have no CPU kernel; called before the model is built."""
    # The grouped product always computes in bfloat16, which on a CPU loses precision for no gain.
    model_args.moe_args.use_grouped_mm = False
    # By default, a Triton kernel computes the permutation of expert parallelism's dispatch.
    moe_utils.generate_permute_indices = partial(generate_permute_indices, use_cpu=True)  # pyright: ignore[reportPrivateImportUsage]
    # Upstream counts tokens with a histogram of int64, which has no CPU kernel.
    torch.histc = histogram


def histogram(input: torch.Tensor, bins: int = 100, min: int = 0, max: int = 0) -> torch.Tensor:
    """Computes ``torch.histc``, also of int64 expert numbers (``max`` is ``bins``) on a CPU."""
    counts_experts = input.dtype == torch.int64 and (min, max) == (0, bins)
    if input.device.type != "cpu" or not counts_experts:
        return _histc(input, bins=bins, min=min, max=max)
    counts = torch.zeros(bins, dtype=torch.int64)
    return counts.scatter_add_(0, input, torch.ones_like(input))
