# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Implements context parallelism by all-to-all exchanges of heads.

In DeepSpeed Ulysses (https://arxiv.org/abs/2309.14509) each rank holds a part of the sequence
outside attention, and the whole sequence but a part of the heads inside attention. Any
attention that works on one device works between the two exchanges, including attention with the
masks of packed rows. Both gloo and NCCL support the exchange.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol


def context_part(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns this rank's part of [rows, seq, ...] along the sequence.

    Without a group that is the whole tensor.
    """
    if group is None:
        return tensor
    return tensor.chunk(group.size(), dim=1)[group.rank()]


def scatter_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchanges [rows, heads, seq / n, head_dim] for [rows, heads / n, seq, head_dim].

    Args:
        tensor: This rank's part of the sequence. ``heads`` must be a multiple of n.
        group: Process group of n ranks.

    Returns:
        In memory the heads of a token follow each other, as upstream's projections lay them out:
        kernels that take tokens of several rows end to end need no further copy.
    """
    n = group.size()
    rows, heads, part, head_dim = tensor.shape
    by_head = tensor.reshape(rows, n, heads // n, part, head_dim)
    by_part = _exchange(by_head.transpose(0, 1), group)  # [n, rows, heads / n, part, head_dim]
    by_token = by_part.permute(1, 0, 3, 2, 4).reshape(rows, n * part, heads // n, head_dim)
    return by_token.transpose(1, 2)


def gather_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchanges [rows, heads / n, seq, head_dim] for [rows, heads, seq / n, head_dim]."""
    n = group.size()
    rows, heads, seq, head_dim = tensor.shape
    by_part = tensor.reshape(rows, heads, n, seq // n, head_dim).permute(2, 0, 1, 3, 4)
    by_head = _exchange(by_part, group)  # [n, rows, heads / n, part, head_dim]
    return by_head.transpose(0, 1).reshape(rows, n * heads, seq // n, head_dim)


def shareable_kv_heads(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Repeats key or value heads until their number is divisible by the number of ranks.

    Consecutive query heads use one key head. Repeating each key head in place therefore keeps
    every query head together with its own key head.
    """
    repeats = num_ranks // math.gcd(tensor.shape[1], num_ranks)
    return tensor.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor


def gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gathers [rows, seq / n, ...] of each rank into [rows, seq, ...] on all ranks.

    Every rank computes the same loss from the whole sequence. The gradient of a rank's part is
    therefore that part of the whole gradient, and nothing needs to be summed.
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
    """Sends slice i of dimension 0 to rank i; slice i of the result comes from rank i."""
    return funcol.all_to_all_single_autograd(tensor.contiguous(), None, None, group)
