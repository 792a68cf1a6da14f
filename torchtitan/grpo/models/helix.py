# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Divides a model into HelixPipe's parts (https://arxiv.org/abs/2507.00394).

Part 2k holds the weights between the attention of layer k - 1 and that of layer k: the output
projection and the feed-forward of the former, and the projections to queries, keys and values of
the latter. The embedding belongs to the first part, and the output layer to the last. Part 2k + 1
is the attention of layer k, which has no weights and can therefore be computed on any rank.

Parameters keep their names in the whole model, so that loading, pushes, exports and checkpoints
find them, although those of one layer are in two parts. Unlike in the paper, the parts with weights
compute queries, keys and values, and send them instead of the weights: with grouped queries they
are hardly larger than hidden states, and gradients of weights need not travel back.
"""

import copy
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from torchtitan.grpo.models.decoder import Decoder
from torchtitan.grpo.models.packed_attention import PackedAttention, context_part
from torchtitan.grpo.models.packed_model import PackedDecoder, PackedModel
from torchtitan.grpo.models.part_names import AFTER_ATTENTION, BEFORE_ATTENTION
from torchtitan.grpo.upstream.models import Attention, TransformerBlock, apply_rotary_emb

Hidden = tuple[torch.Tensor, ...]
"""Tensors between two parts, the last of which is the residual stream [rows, seq, dim].

Before attention, the others are queries [rows, seq, heads, head_dim], keys and values; after it,
there is one, the output of attention [rows, seq, heads * head_dim]. Under tensor and context
parallelism, each rank has its part.
"""


class Projections(Attention):
    """The part of an attention layer before its attention."""

    def forward(self, x, rope_cache, attention_masks=None, positions=None):  # pyright: ignore
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return (*apply_rotary_emb(q, k, rope_cache, positions), v)


class BlockBefore(TransformerBlock):
    """The modules of a layer before its attention."""

    def forward(self, x, rope_cache, attention_masks=None, positions=None) -> Hidden:  # pyright: ignore
        projected = self.attention(self.attention_norm(x), rope_cache, attention_masks, positions)
        return (*(_local(tensor) for tensor in projected), x)

    def init_weights(self, buffer_device: torch.device) -> None:
        self.attention_norm.reset_parameters()
        for linear in (self.attention.wq, self.attention.wk, self.attention.wv):
            nn.init.trunc_normal_(linear.weight, std=0.02)
        for norm in (self.attention.q_norm, self.attention.k_norm):
            if norm is not None:
                norm.reset_parameters()


class BlockAfter(TransformerBlock):
    """The modules of a layer after its attention."""

    def forward(self, x: Hidden, rope_cache, attention_masks=None, positions=None):  # pyright: ignore
        attended, residual = x
        hidden = residual + self.attention.wo(attended)
        return hidden + self.feed_forward(self.ffn_norm(hidden))

    def init_weights(self, buffer_device: torch.device) -> None:
        self.ffn_norm.reset_parameters()
        nn.init.trunc_normal_(self.attention.wo.weight, std=self.weight_init_std)
        self.feed_forward.init_weights(self.weight_init_std)


class HelixPart(PackedDecoder):
    """One part with weights. ``forward`` takes tokens or :data:`Hidden`, and returns the same.

    Its keyword arguments are those of the whole model.
    """

    def attention_mask(self, **_: Any) -> None:
        """Attention is in another part."""

    def forward(self, tokens: Any, *, chunk: slice | None = None, **named: Any) -> Any:  # pyright: ignore
        """``tokens`` are those of one ``chunk`` of this rank's tokens, if there is one."""
        if chunk is None:
            return super().forward(tokens, **named)
        positions = context_part(named["positions"], self.context_group)[:, chunk]
        return Decoder.forward(self, tokens, positions=positions)


class AttentionPart(nn.Module):
    """The attention of every layer, like that of the whole model of which ``part`` is a part."""

    def __init__(self, part: PackedModel) -> None:
        super().__init__()
        self.attention = PackedAttention(part.settings.attention)
        self.attention.context_group = part.context_group
        # The part itself makes no mask. It is no submodule: its parameters do not belong here.
        self._mask_of = PackedModel.attention_mask.__get__(part)
        self._scale: float = part.model_args.head_dim**-0.5  # pyright: ignore

    def mask(self, named_inputs: dict[str, Any]) -> Any:
        """Returns the mask of a microbatch from the keyword arguments of the whole model."""
        return self._mask_of(**named_inputs)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        """Maps what the part before attention returns to the output of attention."""
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = self.attention(*heads_first, block_mask=mask, scale=self._scale)
        return out.transpose(1, 2).flatten(2)


def helix_part(model: PackedDecoder, number: int) -> HelixPart:
    """Returns a copy of the part with weights before the attention of layer ``number``.

    ``model`` is on the meta device, and dense; the last part is that of ``number`` = its layers.
    """
    part = copy.deepcopy(model)
    num_layers = len(part.layers)
    part.__class__ = HelixPart
    for name in list(part.layers):
        block: Any = part.layers[name]
        if int(name) == number:
            _reduce(block, BlockBefore, AFTER_ATTENTION)
            block.attention.__class__ = Projections
        elif int(name) == number - 1:
            _reduce(block, BlockAfter, BEFORE_ATTENTION)
        else:
            del part.layers[name]
    ends: Any = part
    if number > 0:
        ends.tok_embeddings = None
    if number < num_layers:
        ends.norm = ends.output = None
    assert isinstance(part, HelixPart)
    return part


def _reduce(block: Any, kind: type[nn.Module], without: tuple[str, ...]) -> None:
    block.__class__ = kind
    del block.attention.inner_attention
    for name in without:
        parent, _, child = name.rpartition(".")
        setattr(block.get_submodule(parent), child, None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
