# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A mixture of experts: its router, its experts, and the exchange of their tokens between ranks.

Tokens are sorted by expert. With expert parallelism, each rank sends its tokens to the ranks of their experts
by all-to-all (https://arxiv.org/abs/2006.16668) and gets the results back. Under tensor parallelism, either
each rank sends its part of the sequence, or, if each expert is divided as well, every rank sees all tokens and
computes a part of each result. In both cases, the router's gradient must be summed over ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import _functional_collectives as funcol

from torchtitan.grpo.models.blocks.attention import truncated_normal_
from torchtitan.grpo.models.blocks.parts import RoutedExperts
from torchtitan.grpo.models.shards import local_part, summed_part

_GROUP_MULTIPLE = 8
"""CUDA's grouped product needs groups of a multiple of 16 bytes in bfloat16, in which it computes."""


@dataclass(frozen=True)
class Groups:
    """Items sorted into consecutive groups, each of which is padded to a multiple of some number of places.

    Attributes:
        source: [places] int64, the index of the item at a place; 0 in padding.
        place: [items] int64, the place of each item.
        sizes: [groups] int64, the sizes of the padded groups.
    """

    source: torch.Tensor
    place: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor, num_groups: int, multiple: int = 1) -> "Groups":
        """Groups items stably by group ``numbers`` [items] int64. The host does not wait for the device."""
        count, order = len(numbers), numbers.argsort(stable=True)
        groups = torch.arange(num_groups + 1, device=numbers.device)
        begins = torch.searchsorted(numbers[order], groups)
        sizes, place = begins.diff(), torch.empty_like(order)
        at = torch.arange(count, device=numbers.device)
        if multiple == 1:
            place[order] = at
            return cls(order, place, sizes)
        # No group is empty: a product with none of its kind of rows is not computed everywhere.
        sizes = (sizes.clamp(min=1) + multiple - 1) // multiple * multiple
        at += (sizes.cumsum(0) - sizes - begins[:-1])[numbers[order]]
        source = order.new_zeros(count + num_groups * multiple)
        source[at], place[order] = order, at
        return cls(source, place, sizes)


class _Spread(torch.autograd.Function):
    """Copies rows to their places. What padding holds, in the output or in its gradient, does not matter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: Groups, copies: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.place, ctx.copies = groups.place, copies
        if len(x) == 0:  # nothing was sent to this rank's experts
            return x.new_zeros(len(groups.source), x.shape[1])
        return x.index_select(0, groups.source if copies == 1 else groups.source // copies)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.index_select(0, ctx.place)
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad, None, None


def spread(x: torch.Tensor, groups: Groups, copies: int = 1) -> torch.Tensor:
    """Maps [rows, dim] to [places, dim]. Row i is copied to the places of ``copies`` items from i * copies on."""
    return _Spread.apply(x, groups, copies)  # pyright: ignore[reportReturnType]


def collect(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Returns each item's row, [items, dim], from the rows at all places, [places, dim]."""
    return x.index_select(0, groups.place)


class GroupedExperts(nn.Module):
    """Experts, each of which computes a group of rows. With expert parallelism, a rank has some of them."""

    expert_group: dist.ProcessGroup | None = None
    """The ranks that share the experts, in their order."""

    def __init__(self, row: RoutedExperts) -> None:
        super().__init__()
        self.num_experts = row.num_experts
        up = (row.num_experts, row.expert_hidden, row.dim)
        self.w1 = nn.Parameter(torch.empty(up))
        self.w2 = nn.Parameter(torch.empty(row.num_experts, row.dim, row.expert_hidden))
        self.w3 = nn.Parameter(torch.empty(up))
        self.gate = gate

    def init_weights(self, std: float) -> None:
        truncated_normal_(self.w1, 0.02)
        truncated_normal_(self.w2, std)
        truncated_normal_(self.w3, std)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Applies to each token [tokens, dim] the experts that are chosen for it. Returns [tokens, top_k, dim].

        ``chosen`` holds the experts' numbers, [tokens, top_k] int64.
        """
        experts, copies = chosen.flatten(), chosen.shape[1]
        if self.expert_group is None:
            out = self._grouped(x, experts, self.num_experts, copies)
        else:
            out = self._exchanged(x, experts, copies, self.expert_group)
        return out.unflatten(0, chosen.shape)

    def _exchanged(
        self, x: torch.Tensor, experts: torch.Tensor, copies: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        groups, ranks = Groups.of(experts, self.num_experts), group.size()
        received = torch.empty_like(groups.sizes)
        dist.all_to_all_single(received, groups.sizes, group=group)
        per_rank = torch.stack([groups.sizes, received]).unflatten(1, (ranks, -1)).sum(2)
        sent, arriving = per_rank.tolist()  # the host waits for the device
        x = spread(x, groups, copies)
        x = funcol.all_to_all_single_autograd(x, arriving, sent, group)
        num_local = self.num_experts // ranks
        local = torch.arange(num_local, device=x.device).repeat(ranks)
        local = local.repeat_interleave(received, output_size=sum(arriving))
        out = self._grouped(x, local, num_local)
        out = funcol.all_to_all_single_autograd(out, sent, arriving, group)
        return collect(out, groups)

    def _grouped(
        self, x: torch.Tensor, experts: torch.Tensor, num_experts: int, copies: int = 1
    ) -> torch.Tensor:
        groups = Groups.of(experts, num_experts, _GROUP_MULTIPLE if has_grouped_products(x) else 1)
        return collect(self._compute(spread(x, groups, copies), groups.sizes), groups)

    def _compute(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Maps [places, dim] by each group's expert. Groups have ``sizes``; results behind them are undefined."""
        is_grouped = has_grouped_products(x)
        counts = sizes.cumsum(0, dtype=torch.int32) if is_grouped else sizes.tolist()
        hidden = self.gate(self.product(x, self.w1, counts), self.product(x, self.w3, counts))
        return self.product(hidden, self.w2, counts).type_as(x)

    def product(self, x: torch.Tensor, weight: nn.Parameter, counts: Any) -> torch.Tensor:
        """Multiplies each group of rows with the transposed matrix of its expert.

        ``counts`` are the ends of the groups, [experts] int32, for a grouped product, and otherwise a list of
        the groups' sizes.
        """
        return multiply_groups(x, local_part(weight), counts)


def has_grouped_products(x: torch.Tensor) -> bool:
    """Returns whether to use grouped matrix products, which need bfloat16. A CPU would gain nothing by them."""
    return x.is_cuda


def gate(gates: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return F.silu(gates) * hidden


def multiply_groups(x: torch.Tensor, weight: torch.Tensor, counts: Any) -> torch.Tensor:
    transposed = weight.transpose(-2, -1)
    if isinstance(counts, torch.Tensor):
        return torch._grouped_mm(x.bfloat16(), transposed.bfloat16(), offs=counts)
    parts = zip(x.split(counts), transposed, strict=True)
    return torch.cat([rows.matmul(matrix) for rows, matrix in parts])


class Gate(nn.Linear):
    """The router's projection. Under tensor parallelism, each rank has all of it and a part of its gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, summed_part(self.weight))


class Router(nn.Module):
    def __init__(self, row: RoutedExperts) -> None:
        super().__init__()
        self.row, self.gate = row, Gate(row.dim, row.num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights, float32, and the numbers of each token's experts, both [tokens, top_k]."""
        scores = self.gate(x).float().softmax(1)
        chosen = scores.topk(self.row.top_k, dim=1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.row.normalizes:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return weights, chosen

    def init_weights(self, std: float) -> None:
        truncated_normal_(self.gate.weight, std)


class MoE(nn.Module):
    tensor_group: dist.ProcessGroup | None = None
    """The ranks that divide each expert, of which each has a part of the sequence outside."""

    def __init__(self, row: RoutedExperts) -> None:
        super().__init__()
        self.experts, self.router = GroupedExperts(row), Router(row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [rows, seq, dim] to the same shape. Under tensor parallelism, ``seq`` is this rank's part."""
        group = self.tensor_group
        if group is not None:
            x = funcol.all_gather_tensor_autograd(x, 1, group)
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens)
        out = self.experts(tokens, chosen)
        out = torch.bmm(weights.unsqueeze(1), out.float()).to(x.dtype).view(x.shape)
        if group is not None:
            out = funcol.reduce_scatter_tensor_autograd(out, "sum", 1, group)
        return out

    def init_weights(self, std: float) -> None:
        self.experts.init_weights(std)
        self.router.init_weights(std)
