# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The gated feed-forward, and a layer of attention and feed-forward; see `parts.py`."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from torchtitan.grpo.models.blocks.attention import Attention, truncated_normal_
from torchtitan.grpo.models.blocks.experts import MoE
from torchtitan.grpo.models.blocks.parts import GatedFeedForward, Layer
from torchtitan.grpo.models.packed_attention import Mask


class FeedForward(nn.Module):
    def __init__(self, row: GatedFeedForward) -> None:
        super().__init__()
        self.w1 = nn.Linear(row.dim, row.hidden, bias=False)
        self.w2 = nn.Linear(row.hidden, row.dim, bias=False)
        self.w3 = nn.Linear(row.dim, row.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def init_weights(self, std: float) -> None:
        truncated_normal_(self.w1.weight, 0.02)
        truncated_normal_(self.w2.weight, std)
        truncated_normal_(self.w3.weight, std)


class Block(nn.Module):
    """A layer. Its second half is either ``feed_forward`` or ``moe``; the other attribute is None.

    With Helix, some of the layer's modules are None (`helix.py`).
    """

    feed_forward: FeedForward | None
    moe: MoE | None
    attention_norm: Any
    ffn_norm: Any

    def __init__(self, row: Layer, number: int, norm_eps: float) -> None:
        super().__init__()
        self.row, self._std = row, 0.02 / (2 * (number + 1)) ** 0.5
        # A new kind of block is chosen here by the type of its row.
        self.attention = Attention(row.attention, norm_eps)
        self.feed_forward = self.moe = None
        if isinstance(row.feed_forward, GatedFeedForward):
            self.feed_forward = FeedForward(row.feed_forward)
        else:
            self.moe = MoE(row.feed_forward)
        self.attention_norm = nn.RMSNorm(row.dim, eps=norm_eps)
        self.ffn_norm = nn.RMSNorm(row.dim, eps=norm_eps)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, mask: Mask) -> torch.Tensor:
        return self.after_attention(x + self.attention(self.attention_norm(x), rotary, mask))

    def after_attention(self, x: torch.Tensor) -> torch.Tensor:
        part: Any = self.feed_forward if self.moe is None else self.moe
        return x + part(self.ffn_norm(x))

    def init_weights(self) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            if norm is not None:
                norm.reset_parameters()
        for part in (self.attention, self.feed_forward, self.moe):
            if part is not None:
                part.init_weights(self._std)
