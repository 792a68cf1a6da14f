# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Attention that stays inside each sequence of a packed row.

Upstream's own document masks find borders by the EOS token, which a rollout cut at its
length limit does not have. Here the borders come from sequence ids. Upstream's models
hand whatever mask object they are given to ``attention.inner_attention``, so exchanging
that module is all it takes.
"""

from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.attention import FlexAttentionWrapper, create_attention_mask

PackedAttentionKind = Literal["sdpa", "flex"]

_FLEX_MIN_SEQ_LEN = 2048


class DenseMask(BlockMask):
    """A dense mask that passes upstream's ``isinstance(mask, BlockMask)`` check.

    Attributes:
        dense: [rows, 1, seq, seq] bool, True where a query may see a key.
    """

    def __init__(self, dense: torch.Tensor) -> None:
        self.dense = dense


class PackedSDPA(nn.Module):
    """Scaled dot product attention under a :class:`DenseMask`; runs on CPU and CUDA."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        block_mask: DenseMask,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """q: [rows, heads, seq, head_dim]; k, v: [rows, kv_heads, seq, head_dim]."""
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=block_mask.dense, scale=scale, enable_gqa=enable_gqa
        )


def choose_packed_attention(
    setting: Literal["auto", "sdpa", "flex"], device_type: str, seq_len: int
) -> PackedAttentionKind:
    """Resolves ``grpo.packed_attention``; see there."""
    if setting != "auto":
        return setting
    return "flex" if device_type == "cuda" and seq_len >= _FLEX_MIN_SEQ_LEN else "sdpa"


def install_packed_attention(model_parts: list[nn.Module], kind: PackedAttentionKind) -> None:
    """Exchanges the inner attention of every layer. The models are built with flex."""
    if kind == "flex":
        return
    for part in model_parts:
        for module in list(part.modules()):
            if isinstance(getattr(module, "inner_attention", None), FlexAttentionWrapper):
                module.inner_attention = PackedSDPA()


def packed_mask(sequence_ids: torch.Tensor, kind: PackedAttentionKind) -> BlockMask:
    """The mask of packed rows: causal, and only within one sequence.

    Args:
        sequence_ids: [rows, seq] int, one id per sequence of a row. Padding has an id of
            its own, so that no query is left without a key.
    """
    rows, seq = sequence_ids.shape
    if kind == "sdpa":
        same = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
        causal = torch.ones(seq, seq, dtype=torch.bool, device=sequence_ids.device).tril()
        return DenseMask(same & causal)

    def same_sequence(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (sequence_ids[b, q_idx] == sequence_ids[b, kv_idx])

    return create_attention_mask(same_sequence, rows, None, seq, seq)
