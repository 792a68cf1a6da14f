# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Attention that stays inside each sequence of a packed row.

Upstream's document masks find the borders of sequences by the EOS token, which a rollout cut at
its length limit does not have. Here the borders come from sequence ids. Upstream's models pass
any mask object on to ``attention.inner_attention``, so it suffices to replace that module.
"""

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.attention import FlexAttentionWrapper, create_attention_mask

from torchtitan.grpo.models.ulysses import gather_heads, scatter_heads, shareable_kv_heads

PackedAttentionKind = Literal["sdpa", "flex"]

_FLEX_MIN_SEQ_LEN = 2048


class DenseMask(BlockMask):
    """A dense mask that passes upstream's ``isinstance(mask, BlockMask)`` check.

    Attributes:
        dense: [rows, 1, seq, seq] bool, True where a query may attend to a key.
    """

    def __init__(self, dense: torch.Tensor) -> None:
        self.dense = dense


class PackedAttention(nn.Module):
    """Replaces upstream's ``inner_attention`` in every layout.

    Under tensor parallelism the inputs are the heads of this rank (DTensors for Qwen3); under
    context parallelism they are this rank's part of the sequence.

    Args:
        kind: ``sdpa`` for scaled dot-product attention with a :class:`DenseMask`, on CPU and
            CUDA; ``flex`` for FlexAttention.
    """

    context_group: dist.ProcessGroup | None = None

    def __init__(self, kind: PackedAttentionKind) -> None:
        super().__init__()
        self.flex = FlexAttentionWrapper() if kind == "flex" else None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        block_mask: BlockMask,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Computes attention within the sequences of packed rows.

        Args:
            q: [rows, heads, seq, head_dim].
            k: [rows, kv_heads, seq, head_dim].
            v: [rows, kv_heads, seq, head_dim].
            block_mask: The mask of :func:`packed_mask`.
            scale: Factor of the scores; None for ``1 / sqrt(head_dim)``.
            enable_gqa: Whether several query heads use one key-value head.
        """
        if isinstance(q, DTensor):
            assert isinstance(k, DTensor) and isinstance(v, DTensor)
            local = (q.to_local(), k.to_local(), v.to_local())
            out = self._on_this_rank(*local, block_mask, scale, enable_gqa)
            return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)
        return self._on_this_rank(q, k, v, block_mask, scale, enable_gqa)

    def _on_this_rank(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: BlockMask,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        group = self.context_group
        if group is None:
            return self._attend(q, k, v, mask, scale, enable_gqa)
        k, v = (shareable_kv_heads(t, group.size()) for t in (k, v))
        q, k, v = (scatter_heads(t, group) for t in (q, k, v))
        out = self._attend(q, k, v, mask, scale, q.shape[1] != k.shape[1])
        return gather_heads(out, group)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: BlockMask,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        if self.flex is not None:
            return self.flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=enable_gqa)
        assert isinstance(mask, DenseMask)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.dense, scale=scale, enable_gqa=enable_gqa
        )


def choose_packed_attention(
    setting: Literal["auto", "sdpa", "flex"], device_type: str, seq_len: int
) -> PackedAttentionKind:
    """Resolves ``grpo.packed_attention``, whose documentation describes the choice."""
    if setting != "auto":
        return setting
    return "flex" if device_type == "cuda" and seq_len >= _FLEX_MIN_SEQ_LEN else "sdpa"


def packed_mask(sequence_ids: torch.Tensor, kind: PackedAttentionKind) -> BlockMask:
    """Returns the mask of packed rows, which is causal and limited to one sequence.

    Args:
        sequence_ids: [rows, seq] int, one id for each sequence of a row. Padding has an id of
            its own, so that no query is left without a key.
        kind: The attention that will use the mask.
    """
    rows, seq = sequence_ids.shape
    if kind == "sdpa":
        same = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
        causal = torch.ones(seq, seq, dtype=torch.bool, device=sequence_ids.device).tril()
        return DenseMask(same & causal)

    def same_sequence(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (sequence_ids[b, q_idx] == sequence_ids[b, kv_idx])

    return create_attention_mask(same_sequence, rows, None, seq, seq)
