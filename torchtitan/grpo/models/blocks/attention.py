# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Grouped-query attention; see `parts.py`."""

import torch
import torch.nn as nn

from torchtitan.grpo.models.blocks.parts import GroupedAttention
from torchtitan.grpo.models.blocks.rotary import rotate
from torchtitan.grpo.models.packed_attention import Mask, PackedAttention


def truncated_normal_(tensor: torch.Tensor, std: float, bound: float = 2.0) -> None:
    """Fills a tensor from a normal distribution truncated at +-``bound``, computed in float32."""
    values = tensor.float()
    nn.init.trunc_normal_(values, std=std, a=-bound, b=bound)
    tensor.copy_(values)


class Attention(nn.Module):
    """Grouped-query attention. Under tensor parallelism, a rank computes some of the heads of all tokens."""

    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None

    def __init__(self, row: GroupedAttention, norm_eps: float) -> None:
        super().__init__()
        self.head_dim, self.scale = row.head_dim, row.head_dim**-0.5
        self.wq = nn.Linear(row.dim, row.heads, bias=row.has_bias)
        self.wk = nn.Linear(row.dim, row.kv_heads, bias=row.has_bias)
        self.wv = nn.Linear(row.dim, row.kv_heads, bias=row.has_bias)
        self.wo = nn.Linear(row.heads, row.dim, bias=False)
        norms = row.has_qk_norm
        self.q_norm = nn.RMSNorm(row.head_dim, eps=norm_eps) if norms else None
        self.k_norm = nn.RMSNorm(row.head_dim, eps=norm_eps) if norms else None
        self.inner_attention = PackedAttention()

    def init_weights(self, std: float) -> None:
        # Helix leaves parts of a layer out.
        for linear in (self.wq, self.wk, self.wv, self.wo):
            if linear is not None:
                truncated_normal_(linear.weight, std if linear is self.wo else 0.02)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def project(
        self, x: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries [rows, seq, heads, head_dim], and keys and values with their own number of heads."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return rotate(q, rotary), rotate(k, rotary), v

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, mask: Mask) -> torch.Tensor:
        """Maps [rows, seq, dim] to the same shape. ``rotary`` is [rows, seq, 1, 2 * head_dim]."""
        q, k, v = (heads.transpose(1, 2) for heads in self.project(x, rotary))
        out = self.inner_attention(q, k, v, mask, self.scale)
        return self.wo(out.transpose(1, 2).flatten(2))
