# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Attention within each sequence of a packed row and the context that the sequence shares with others.

Each token has a ``reach``, the index in its row after the last token that sees it: a query at q
sees the key at k if ``k <= q < reach[k]`` (`data/shared_context.py`). Upstream's document masks find
borders by the EOS token, which truncated rollouts lack. In a layer with a window, the query must also
be fewer than ``window`` positions after the key in its sequence.

Context parallelism exchanges heads by all-to-all (DeepSpeed Ulysses,
https://arxiv.org/abs/2309.14509): each rank holds a part of the sequence outside attention, and
the whole sequence of some heads inside. Both gloo and NCCL support the exchange.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import _functional_collectives as funcol

from torchtitan.grpo.models.tree_attention import (
    GROUPED_HEADS,
    MAX_LEVELS,
    Levels,
    attend_to_tree,
    levels_of,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# `torch.nn.attention.varlen` and `flex_attention` import the compiler, seconds of a core: functions import them.

PackedAttentionKind = Literal["varlen", "flex", "sdpa"]

# A dense mask of shorter rows costs less than a mask of blocks.
_FLEX_MIN_SEQ_LEN = 2048
# A multiple of every kernel's block, so that rounding up launches no more blocks.
_LONGEST_MULTIPLE = 128
# Each border takes scratch memory in the backward pass, as much as 128 tokens of float32 queries.
_BORDERS_MULTIPLE = 8
# Compiled blocks get as many borders as rows have with sequences of this length, and more if needed.
_COMPILED_SEQUENCE_TOKENS, _COMPILED_MIN_BORDERS = 128, 64


@dataclass(frozen=True)
class DenseMask:
    """A dense mask, [rows, 1, seq, seq] bool."""

    dense: torch.Tensor


@dataclass(frozen=True)
class SpanBorders:
    """The borders of spans (runs of tokens with equal reach), for the variable-length kernel.

    ``borders`` [n] int32 are the starts of spans in all rows laid end to end, followed by the total number
    of tokens, once or more. ``longest`` is at least the length of each span. ``shared`` are the
    contexts that several sequences see, or None. ``window`` is as in :func:`packed_mask`.
    """

    borders: torch.Tensor
    longest: int
    shared: Levels | None
    window: int | None = None


Mask: TypeAlias = "DenseMask | SpanBorders | BlockMask"


class HostReach:
    """The reach of packed rows' tokens, [rows, seq] int, on the host, where reading it does not wait.

    This is a class because FSDP would move a plain tensor, or one in a known container, to the device.
    """

    def __init__(self, reach: torch.Tensor) -> None:
        self._reach = reach.numpy()

    def spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns begin, end and reach of all spans, each [spans] int64, as indices into rows laid end to end."""
        # Two spans that follow each other never have the same reach.
        begins = np.flatnonzero(np.diff(self._reach, axis=1, prepend=-1))
        ends = np.append(begins[1:], self._reach.size)
        row_begins = begins - begins % self._reach.shape[1]
        return begins, ends, row_begins + self._reach.reshape(-1)[begins]


class PackedAttention(nn.Module):
    """Attention whose inputs are this rank's heads (tensor parallel) or sequence part (context parallel)."""

    context_group: dist.ProcessGroup | None = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Takes q [rows, heads, seq, head_dim]; k and v have ``kv_heads`` in place of heads."""
        group = self.context_group
        if group is None:
            return attend(q, k, v, mask, scale)
        k, v = (shareable_kv_heads(t, group.size()) for t in (k, v))
        q, k, v = (scatter_heads(t, group) for t in (q, k, v))
        return gather_heads(attend(q, k, v, mask, scale), group)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float | None
) -> torch.Tensor:
    """Computes attention with the kernel for which the mask was made. Inputs are all tokens of some heads."""
    if isinstance(mask, SpanBorders):
        return _attend_by_length(q, k, v, mask, scale)
    if not isinstance(mask, DenseMask):
        return _attend_by_block(q, k, v, mask, scale)
    if q.is_cuda:
        # CUDA's flash kernel takes no mask, and the memory-efficient one, up to torch 2.13, no
        # groups of query heads. The remaining kernel keeps all scores in memory.
        k, v = (one_head_each(t, q.shape[1]) for t in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.dense, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _attend_by_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "BlockMask", scale: float | None
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    grouped = q.shape[1] != k.shape[1]
    flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    return flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)


def one_head_each(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats heads of keys or values, [rows, kv_heads, seq, head_dim], for each query head."""
    repeats = heads // tensor.shape[1]
    return tensor.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor


@functools.cache
def _compiled_flex_attention() -> Callable[..., torch.Tensor]:
    """Compiles FlexAttention without two options that upstream sets: wrapped regions and autotuning.

    Wrapping compiled regions fails with some versions of torch
    (https://github.com/pytorch/torchtitan/issues/2463). Without wrapping, selective checkpointing
    computes attention twice. Autotuning takes minutes on every rank.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)  # pyright: ignore[reportReturnType]


@functools.cache
def _compiled_create_block_mask() -> Callable[..., "BlockMask"]:
    """Compiles ``create_block_mask``, which without compilation would first make a dense mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


def _attend_by_length(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: SpanBorders, scale: float | None
) -> torch.Tensor:
    from torch.nn.attention import varlen as kernels

    rows, _, seq, _ = q.shape
    # Views of the projections' tensors, which have this order.
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    borders, longest, shared = mask.borders, mask.longest, mask.shared
    if shared is None:
        left = -1 if mask.window is None else mask.window - 1
        out: Any = kernels.varlen_attn(
            q, k, v, borders, borders, longest, longest,
            scale=scale, window_size=(left, 0), **GROUPED_HEADS,
        )  # fmt: skip
    else:
        tensors = [tensor for level in shared.levels for tensor in level]
        out, _ = attend_to_tree(q, k, v, borders, longest, tensors, shared.sizes, scale)
    return out.unflatten(0, (rows, seq)).transpose(1, 2)


def flex_pays(seq_len: int) -> bool:
    """Returns whether FlexAttention saves more time than its block mask costs."""
    return seq_len >= _FLEX_MIN_SEQ_LEN


def packed_mask(
    reach: torch.Tensor,
    kind: PackedAttentionKind,
    host: HostReach | None = None,
    *,
    compiled: bool = False,
    may_share: bool = True,
    window: int | None = None,
    positions: torch.Tensor | None = None,
) -> Mask:
    """Returns the mask of packed rows, in which a query sees its sequence up to itself.

    Args:
        reach: [rows, seq] int, as in ``TrainRows``. Padding is a span too, since each query needs a key.
        kind: The kernel that takes the mask.
        host: The reach on the host. Without it, the host waits for the device.
        compiled: Whether to keep sizes fixed, because new sizes would compile blocks anew.
        may_share: Whether rows may have shared contexts; if so, fixed sizes leave room for them.
        window: How many tokens of its sequence a query sees at most, its own included; None for all.
        positions: [rows, seq] int, each token's position in its sequence. Needed with a window.
    """
    rows, seq = reach.shape
    window = None if window is None or window >= seq else window
    if kind == "varlen" and (window is None or not may_share):
        borders = _span_borders(reach, host or HostReach(reach.cpu()), compiled, may_share)
        return replace(borders, window=window)
    if kind == "varlen":  # whose calls for shared contexts have no window
        kind = "flex" if flex_pays(seq) else "sdpa"
    assert window is None or positions is not None, "a window counts positions"
    if kind == "sdpa":
        places = torch.arange(seq, device=reach.device)
        is_past = places[None, :] <= places[:, None]
        dense = is_past & (places[:, None] < reach[:, None, None, :])
        if window is not None and positions is not None:
            dense &= positions[:, None, :, None] - positions[:, None, None, :] < window
        return DenseMask(dense)

    def sees(b, h, q_idx, kv_idx):
        causal = (q_idx >= kv_idx) & (q_idx < reach[b, kv_idx])
        if window is None or positions is None:
            return causal
        return causal & (positions[b, q_idx] - positions[b, kv_idx] < window)

    return _compiled_create_block_mask()(sees, rows, None, seq, seq, device=reach.device)


def _span_borders(
    reach: torch.Tensor, host: HostReach, compiled: bool, may_share: bool
) -> SpanBorders:
    """Returns the borders of spans, padded to one of a few sizes, or with ``compiled`` to a fixed size."""
    begins, ends, reaches = host.spans()
    count, longest, total = len(begins), int((ends - begins).max()), reach.numel()
    sizes = None
    if compiled:
        fixed = max(_COMPILED_MIN_BORDERS, total // _COMPILED_SEQUENCE_TOKENS)
        count, longest = max(count, fixed - 1), reach.shape[1]
    size = _round_up(count + 1, _BORDERS_MULTIPLE)
    if compiled:
        sizes = (MAX_LEVELS, total, size)
    # Computed where it is needed, because the host would have to send the borders.
    is_first = reach.diff(dim=1, prepend=reach[:, :1] - 1) != 0
    borders = torch.nonzero_static(is_first.flatten(), size=size, fill_value=total).squeeze(1)
    is_shared = reaches > ends
    shared = None
    if (compiled and may_share) or is_shared.any():
        contexts = begins[is_shared], ends[is_shared], reaches[is_shared]
        shared = levels_of(contexts, reach.device, sizes)
    longest = _round_up(longest, _LONGEST_MULTIPLE)
    return SpanBorders(borders.to(torch.int32), longest, shared)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def context_part(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns this rank's part of [rows, seq, ...]; without a group, all of it."""
    if group is None:
        return tensor
    return tensor.chunk(group.size(), dim=1)[group.rank()]


def scatter_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchanges [rows, heads, seq / n, head_dim] for [rows, heads / n, seq, head_dim].

    In the result, the heads of a token are adjacent in memory, so that varlen kernels need no copy.
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
    """Repeats key or value heads, copies next to each other, so that the heads divide evenly among ranks."""
    repeats = num_ranks // math.gcd(tensor.shape[1], num_ranks)
    return tensor.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor


def gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gathers [rows, seq / n, ...] of each rank into [rows, seq, ...] on all ranks.

    Every rank computes the same loss, so that gradients of the parts need no sum over ranks.
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
