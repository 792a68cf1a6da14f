# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The model for packed rows; it returns logprobs instead of logits.

One ``forward`` serves every layout. Each stage builds its own mask from the sequence ids and, under
context parallelism, takes its own part of the row.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan.grpo.models.decoder import Decoder
from torchtitan.grpo.models.logprob_head import LogprobHead, replace_output
from torchtitan.grpo.models.packed_attention import (
    HostSequences,
    PackedAttention,
    PackedAttentionKind,
    packed_mask,
)
from torchtitan.grpo.models.scored_tokens import ScoredTokens
from torchtitan.grpo.models.tied_embeddings import embeds_tokens
from torchtitan.grpo.models.ulysses import context_part, gather_sequence


@dataclass(frozen=True)
class ScoringSettings:
    """Settings of how a model scores tokens.

    Attributes:
        attention: Kernel that keeps attention inside sequences.
        compiled: Whether blocks are compiled; see :func:`packed_mask`.
        temperature: Sampling temperature under which logprobs are computed.
        chunk_tokens: Number of tokens whose logits exist at the same time.
        with_entropy: Whether to compute the entropy; otherwise it is 0.
        trains_entropy: Whether the loss may depend on the entropy; otherwise it has no gradient.
        keep_logits: Whether to keep logits for the backward pass, in the memory of the output
            weight's gradient, which is allocated in the forward pass.
    """

    attention: PackedAttentionKind
    compiled: bool
    temperature: float
    chunk_tokens: int
    with_entropy: bool
    trains_entropy: bool
    keep_logits: bool


class PackedModel(nn.Module):
    """Mixin that precedes an upstream model in the bases of a class."""

    context_group: dist.ProcessGroup | None = None

    def __init__(self, model_args, settings: ScoringSettings) -> None:
        super().__init__(model_args)
        self.settings = settings
        for block in self.layers.values():  # pyright: ignore
            block.attention.inner_attention = PackedAttention(settings.attention)  # pyright: ignore
        replace_output(
            self,
            temperature=settings.temperature,
            chunk_tokens=settings.chunk_tokens,
            with_entropy=settings.with_entropy,
            trains_entropy=settings.trains_entropy,
            keep_logits=settings.keep_logits,
        )

    def split_context(self, group: dist.ProcessGroup) -> None:
        """Turns on context parallelism over ``group``."""
        self.context_group = group
        for module in self.modules():
            if isinstance(module, PackedAttention):
                module.context_group = group  # pyright: ignore[reportArgumentType]

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        sequence_ids: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        host_sequences: HostSequences | None = None,
        scored: ScoredTokens | None = None,
        other_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs packed rows through the model, or through one pipeline stage of it.

        Args:
            tokens: [rows, seq] int; on later stages the hidden states of the previous stage.
            sequence_ids: [rows, seq] int, see :func:`packed_mask`.
            positions: [rows, seq] int, starting at 0 in each sequence.
            labels: [rows, seq] int, tokens whose logprobs are computed.
            host_sequences: The sequences as the host knows them; see :func:`packed_mask`.
            scored: The positions at which they are computed; None for all.
            other_ids: [rows, seq, k] int, further tokens at each position whose logprobs are computed;
                None for none.

        Returns:
            [rows, seq, 2 + k] float32: logprobs of the labels, entropies, and logprobs of the further
            tokens; all are 0 where nothing is scored. Stages before the last one return hidden states
            instead, of which tensor and context parallelism leave a part to each rank.
        """
        group = self.context_group
        if embeds_tokens(self):
            tokens = context_part(tokens, group)
        settings = self.settings
        mask = packed_mask(
            sequence_ids, settings.attention, host_sequences, compiled=settings.compiled
        )
        inputs = {"attention_masks": mask, "positions": context_part(positions, group)}
        head: Any = self.output
        if not isinstance(head, LogprobHead):
            return super().forward(tokens, **inputs)  # pyright: ignore
        where = scored.positions(lambda mask: context_part(mask, group)) if scored else None
        if other_ids is not None:
            other_ids = context_part(other_ids, group)
        with head.labeled(context_part(labels, group), where, other_ids):
            return gather_sequence(super().forward(tokens, **inputs), group)  # pyright: ignore


class PackedDecoder(PackedModel, Decoder):
    """Adapts the model of all families to packed rows."""
