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

from torchtitan.grpo.models.blocks.attention import Attention
from torchtitan.grpo.models.blocks.layer import Block
from torchtitan.grpo.models.packed_attention import PackedAttention, context_part
from torchtitan.grpo.models.packed_model import PackedModel

Hidden = tuple[torch.Tensor, ...]
"""Tensors between two parts, the last of which is the residual stream [rows, seq, dim].

Before attention, the others are queries [rows, seq, heads, head_dim], keys and values; after it,
there is one, the output of attention [rows, seq, heads * head_dim]. Under tensor and context
parallelism, each rank has its part.
"""


class Projections(Attention):
    """The projections to queries, keys and values of an attention layer."""

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, mask: None) -> Hidden:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.project(x, rotary)


class BlockBefore(Block):
    """The modules of a layer before its attention."""

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, mask: None) -> Hidden:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (*self.attention(self.attention_norm(x), rotary, mask), x)


class BlockAfter(Block):
    """The modules of a layer after its attention."""

    def forward(self, x: Hidden, rotary: torch.Tensor, mask: None) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        attended, residual = x
        return self.after_attention(residual + self.attention.wo(attended))


class HelixPart(PackedModel):
    """One part with weights. ``forward`` takes tokens or :data:`Hidden`, and returns :data:`Hidden` or output.

    The keyword arguments of ``forward`` are those of the whole model.
    """

    def attention_masks(self, **_: Any) -> list[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns no masks, because attention is in another part."""
        return [None] * len(self.model_args.layers.kinds)

    def forward(self, tokens: Any, *, chunk: slice | None = None, **named: Any) -> Any:  # pyright: ignore
        """Computes this part. With a ``chunk``, ``tokens`` are only this slice of the rank's tokens."""
        if chunk is None:
            return super().forward(tokens, **named)
        positions = context_part(named["positions"], self.context_group)[:, chunk]
        return self.decode(tokens, positions, self.attention_masks())  # pyright: ignore


class AttentionPart(nn.Module):
    """Computes the attention of any layer, with the masks and the scale of the model that ``part`` is from."""

    def __init__(self, part: PackedModel) -> None:
        super().__init__()
        self.attention = PackedAttention()
        self.attention.context_group = part.context_group
        # The part itself makes no mask. It is no submodule: its parameters do not belong here.
        self._masks_of = PackedModel.attention_masks.__get__(part)
        self._scale = part.model_args.head_dim**-0.5

    def mask(self, named_inputs: dict[str, Any]) -> Any:
        """Returns the mask of a microbatch from the keyword arguments of the whole model."""
        (mask,) = self._masks_of(**named_inputs)
        return mask

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        """Maps queries, keys and values from the part before to the output of attention."""
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = self.attention(*heads_first, mask, self._scale)
        return out.transpose(1, 2).flatten(2)


def helix_part(model: PackedModel, number: int) -> HelixPart:
    """Returns, as a copy, the part with weights that comes before the attention of layer ``number``.

    ``model`` is on the meta device and has no experts. With L layers, ``number = L`` gives the last part.
    """
    part = copy.deepcopy(model)
    num_layers = len(part.layers)
    part.__class__ = HelixPart
    for name in list(part.layers):
        block: Any = part.layers[name]
        if int(name) == number:
            _reduce(block, BlockBefore, is_before=True)
            block.attention.__class__ = Projections
        elif int(name) == number - 1:
            _reduce(block, BlockAfter, is_before=False)
        else:
            del part.layers[name]
    if number > 0:
        part.tok_embeddings = None
    if number < num_layers:
        part.norm = part.output = None
    assert isinstance(part, HelixPart)
    return part


def _reduce(block: Block, kind: type[Block], *, is_before: bool) -> None:
    block.__class__ = kind
    row = block.row.attention
    del block.attention.inner_attention
    for name in row.after if is_before else row.before:
        setattr(block.attention, name.removeprefix("attention."), None)
    if is_before:
        block.ffn_norm = block.feed_forward = None
    else:
        block.attention_norm = None
