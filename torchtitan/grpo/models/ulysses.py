# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Context parallelism by all-to-all.

DeepSpeed Ulysses (https://arxiv.org/abs/2309.14509): outside of attention each rank holds
a part of the sequence, inside it holds all of the sequence and a part of the heads. Any
attention that works on one device works between the two exchanges, masks of packed rows
included, and gloo runs it as NCCL does.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol


def context_part(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's part of [rows, seq, ...] along the sequence."""
    if group is None:
        return tensor
    return tensor.chunk(group.size(), dim=1)[group.rank()]


def scatter_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[rows, heads, seq / n, head_dim] -> [rows, heads / n, seq, head_dim].

    Args:
        tensor: This rank's part of the sequence; ``heads`` is a multiple of n.
        group: n ranks.
    """
    n = group.size()
    rows, heads, part, head_dim = tensor.shape
    by_head = tensor.reshape(rows, n, heads // n, part, head_dim)
    by_part = _exchange(by_head.transpose(0, 1), group)  # [n, rows, heads / n, part, head_dim]
    return by_part.permute(1, 2, 0, 3, 4).reshape(rows, heads // n, n * part, head_dim)


def gather_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[rows, heads / n, seq, head_dim] -> [rows, heads, seq / n, head_dim]."""
    n = group.size()
    rows, heads, seq, head_dim = tensor.shape
    by_part = tensor.reshape(rows, heads, n, seq // n, head_dim).permute(2, 0, 1, 3, 4)
    by_head = _exchange(by_part, group)  # [n, rows, heads / n, part, head_dim]
    return by_head.transpose(0, 1).reshape(rows, n * heads, seq // n, head_dim)


def shareable_kv_heads(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Repeats key or value heads until every rank gets the same number.

    Consecutive query heads share a key head, so repeating each in place keeps every query
    with its own.
    """
    repeats = num_ranks // math.gcd(tensor.shape[1], num_ranks)
    return tensor.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor


def gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[rows, seq / n, ...] on each rank -> [rows, seq, ...] on all.

    Every rank goes on with the whole, and computes the same loss from it; so the gradient
    of a rank's part is that part of the whole's gradient, and nothing is summed.
    """
    if group is None:
        return tensor
    return _GatherSequence.apply(tensor, group)  # pyright: ignore[reportReturnType]


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return context_part(grads[0], ctx.group).contiguous(), None


def _exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Slice i of dimension 0 goes to rank i; slice i of the result came from rank i."""
    return funcol.all_to_all_single_autograd(tensor.contiguous(), None, None, group)
