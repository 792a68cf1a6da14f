# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gradients of a mixture of experts under tensor parallelism.

Each tensor-parallel rank has a part of the experts' output only: of the sum over hidden
units, or of the tokens. So what flows back to the router's scores is a part of their
gradient, too, and upstream takes it for the whole: the router is then trained by different
gradients on different ranks. Hooks around upstream's modules add the parts up.
"""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def sum_moe_gradients(model: nn.Module, mesh: DeviceMesh, *, splits_tokens: bool) -> None:
    """Completes the gradients of every mixture of experts. After upstream's sharding.

    Args:
        model: With upstream's blocks in ``layers``.
        mesh: The tensor-parallel one.
        splits_tokens: Expert parallelism borrows the tensor-parallel ranks, which then
            send different tokens to the experts; otherwise they compute parts of each.
    """

    def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it is; its gradient is the sum of all ranks'."""
        replicated = DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)
        return replicated.to_local(grad_placements=(Partial(),))

    def before_moe(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return sum_over_ranks(inputs[0])

    def before_gate(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        # Whole already, and about to be summed with what the experts make a part of.
        return _ShareGradient.apply(inputs[0], mesh.size())  # pyright: ignore[reportReturnType]

    def after_gate(_: nn.Module, __: tuple[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(scores)

    blocks: list[Any] = list(model.layers.values())  # pyright: ignore
    for block in blocks:
        if not block.moe_enabled:
            continue
        # Last, to see what upstream's own hook makes of the output: a plain tensor.
        block.moe.router.gate.register_forward_hook(after_gate)
        if splits_tokens:
            block.moe.register_forward_pre_hook(before_moe)
            block.moe.router.gate.register_forward_pre_hook(before_gate, prepend=True)


class _ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
        ctx.num_ranks = num_ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] / ctx.num_ranks, None
