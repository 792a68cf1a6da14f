# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Upstream's models, for packed rows, answering with logprobs instead of logits.

One forward serves every layout. Its arguments are tensors with a row each, which is what
pipeline schedules know how to cut into microbatches; each stage makes its own mask from
the sequence ids, and under context parallelism takes its own part of the row.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.models.llama3.model.model import Transformer as Llama
from torchtitan.models.qwen3.model.model import Qwen3Model

from torchtitan.grpo.models.logprob_head import LogprobHead, replace_output
from torchtitan.grpo.models.packed_attention import (
    PackedAttention,
    PackedAttentionKind,
    packed_mask,
)
from torchtitan.grpo.models.ulysses import context_part, gather_sequence


@dataclass(frozen=True)
class ScoringSettings:
    """How a model scores tokens.

    Attributes:
        attention: How attention is kept inside sequences.
        temperature: Of the sampling that is scored.
        chunk_tokens: Tokens whose logits exist at a time.
        with_entropy: Compute the entropy, too; it is 0 otherwise.
        keep_logits: Keep logits for the backward pass in the memory of the output weight's
            gradient, which is taken in the forward pass.
    """

    attention: PackedAttentionKind
    temperature: float
    chunk_tokens: int
    with_entropy: bool
    keep_logits: bool


class PackedModel(nn.Module):
    """Mixed in before an upstream model."""

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
            keep_logits=settings.keep_logits,
        )

    def split_context(self, group: dist.ProcessGroup) -> None:
        """Context parallelism over ``group`` from now on."""
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
    ) -> torch.Tensor:
        """One pass over packed rows, or over one pipeline stage of it.

        Args:
            tokens: [rows, seq] int; on later stages the hidden states of the stage before.
            sequence_ids: [rows, seq] int, see :func:`packed_mask`.
            positions: [rows, seq] int, restarting at 0 with each sequence.
            labels: [rows, seq] int, whose logprobs are wanted.

        Returns:
            [rows, seq, 2] float32: logprobs of the labels, and entropies. Before the last
            stage the hidden states, in whatever part tensor and context parallelism leave
            to this rank.
        """
        group = self.context_group
        if self.tok_embeddings is not None:
            tokens = context_part(tokens, group)
        mask = packed_mask(sequence_ids, self.settings.attention)
        inputs = {"attention_masks": mask, "positions": context_part(positions, group)}
        head: Any = self.output
        if not isinstance(head, LogprobHead):
            return super().forward(tokens, **inputs)  # pyright: ignore
        with head.labelled(context_part(labels, group)):
            return gather_sequence(super().forward(tokens, **inputs), group)  # pyright: ignore


class PackedLlama(PackedModel, Llama):
    """Llama 3."""

    def __init__(self, model_args, settings: ScoringSettings) -> None:
        super().__init__(model_args, settings)
        for block in self.layers.values():
            # What Qwen3's blocks say of themselves, and upstream's sharding asks of all.
            block.moe_enabled = False  # pyright: ignore


class PackedQwen3(PackedModel, Qwen3Model):
    """Qwen3 and Qwen3-MoE."""
