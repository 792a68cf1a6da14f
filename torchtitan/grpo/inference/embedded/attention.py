# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Attention of one step, over the slots and over the step's own tokens.

With grouped-query attention, keys and values are not copied for each query head of a group, except in whole
prompts on a GPU, where it costs little. For one token of each row, the query heads of a group are passed as
query positions of one head. For a chunk, the groups are passed as a batch whose heads read the same memory.

On a GPU, fused kernels compute all of these shapes, in 16 bits and in float32. Torch's unfused kernel is
excluded, so that it is never used unnoticed. cuDNN's kernel is excluded because it makes a plan for each new
shape, and lengths change in every step.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from torchtitan.grpo.inference.embedded.kv_cache import SlotCache
from torchtitan.grpo.inference.embedded.step_layout import ChunkPart, RowRange

ATTENTION = "slot_attention"

# Memory-efficient attention copies a mask whose rows do not begin at multiples of so many elements.
_MASK_ALIGNMENT = 8


def fused_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which attention on a GPU runs in fused kernels, and fails if none of them can."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])


def additive_mask(hidden_from: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a mask [queries, keys] that is -inf where ``hidden_from`` is true, and 0 elsewhere."""
    num_queries, num_keys = hidden_from.shape
    padded = -(-num_keys // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    mask = torch.zeros(num_queries, padded, dtype=dtype, device=hidden_from.device)
    return mask[:, :num_keys].masked_fill_(hidden_from, float("-inf"))


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    slot_cache: SlotCache | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of one layer, whose ``layer_idx`` selects its slots.

    The query is [1, num_heads, num_tokens, head_dim], in the order of the step's layout. The layout decides
    which positions a token sees; ``attention_mask`` is ignored. Key and value, [1, num_kv_heads,
    num_tokens, head_dim], are in the slots already. Without ``slot_cache``, attention is plain and
    causal. Returns [batch, num_tokens, num_heads, head_dim], and no attention weights.
    """
    if slot_cache is None:
        return _causal(query, key, value, scaling).transpose(1, 2).contiguous(), None
    step = slot_cache.step
    keys, values = slot_cache.slots[module.layer_idx]  # pyright: ignore[reportArgumentType, reportCallIssue]
    num_heads, num_tokens, head_dim = query.shape[1:]
    output = query.new_empty(num_tokens, num_heads, head_dim)
    for rows in step.ranges:
        output[rows.start : rows.stop] = _attend_rows(query, keys, values, rows, scaling)
    if step.whole is not None:
        num_prompts, length = step.whole.ids.shape
        place = slice(step.num_rows, step.chunk_start)
        query_w, key_w, value_w = (
            t[0, :, place].unflatten(1, (num_prompts, length)).transpose(0, 1)
            for t in (query, key, value)
        )
        whole = _causal(query_w, key_w, value_w, scaling)
        output[place] = whole.transpose(1, 2).flatten(0, 1)
    if step.chunk is not None:
        slot, stop = step.chunk.first_slot, step.chunk.stop
        output[step.chunk_start :] = _attend_chunk(
            query[0, :, step.chunk_start :],
            keys[slot, :, :stop],
            values[slot, :, :stop],
            step.chunk,
            scaling,
        )
    return output.unsqueeze(0), None


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    if query.is_cuda and query.shape[1] != key.shape[1]:
        # Only memory-efficient attention takes float32, and it has no grouped heads.
        group = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, scale=scaling, is_causal=True, enable_gqa=grouped
    )


def _attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: RowRange,
    scaling: float | None,
) -> torch.Tensor:
    """Computes attention of one token of each row of a range; returns [rows, heads, head_dim]."""
    place, num_kv_heads = slice(rows.start, rows.stop), keys.shape[1]
    grouped = query[0, :, place].transpose(0, 1).unflatten(1, (num_kv_heads, -1))
    output = scaled_dot_product_attention(
        grouped,
        keys[place, :, : rows.length],
        values[place, :, : rows.length],
        attn_mask=rows.mask,
        scale=scaling,
    )
    return output.flatten(1, 2)


def _attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: ChunkPart,
    scaling: float | None,
) -> torch.Tensor:
    """Computes attention of a chunk with queries [heads, tokens, head_dim]; returns [tokens, heads, head_dim].
    Keys and values, [kv_heads, chunk.stop, head_dim], include those of the chunk.
    """
    num_kv_heads = keys.shape[0]
    grouped = query.unflatten(0, (num_kv_heads, -1))
    shape = (num_kv_heads, grouped.shape[1], *keys.shape[1:])
    output = scaled_dot_product_attention(
        grouped,
        keys.unsqueeze(1).expand(shape),
        values.unsqueeze(1).expand(shape),
        attn_mask=chunk.mask,
        scale=scaling,
        is_causal=chunk.mask is None,
    )
    return output.flatten(0, 1).transpose(0, 1)


AttentionInterface.register(ATTENTION, slot_attention)
