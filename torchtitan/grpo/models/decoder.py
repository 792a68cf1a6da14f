# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The decoder of all families: an embedding, layers of blocks, a last norm, and an output layer.

With tied embeddings, the first and the last pipeline stage each hold a copy of the weight. The last
stage also has an embedding module, only to hold its copy, so that both copies have the same name
in pushes, exports and checkpoints. `training/gradient_norm.py` keeps the copies equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.blocks.attention import truncated_normal_
from torchtitan.grpo.models.blocks.layer import Block
from torchtitan.grpo.models.blocks.parts import Layers
from torchtitan.grpo.models.blocks.rotary import Rotary, read_rotary
from torchtitan.grpo.models.families import Family
from torchtitan.grpo.models.packed_attention import Mask
from torchtitan.grpo.system.logs import logger


@dataclass
class DecoderArgs:
    """Sizes of a decoder. :meth:`update_from_config` sets ``max_seq_len`` to the length of training rows."""

    dim: int = 0
    vocab_size: int = 0
    norm_eps: float = 1e-6
    max_seq_len: int = 0
    enable_weight_tying: bool = False
    rotary: Rotary = field(default_factory=lambda: Rotary(1e4, "default", ()))
    layers: Layers = field(default_factory=lambda: Layers(()))
    lora_scale: float = 0.0

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def head_dim(self) -> int:
        """The largest head size of any layer, which the attention kernel must support."""
        return max(layer.attention.head_dim for layer in self.layers.kinds)

    @property
    def has_experts(self) -> bool:
        return any(layer.feed_forward.has_experts for layer in self.layers.kinds)

    def update_from_config(self, job_config: JobConfig) -> None:
        seq_len = job_config.training.seq_len
        if seq_len > self.max_seq_len:
            logger.warning(
                f"training.seq_len ({seq_len}) is longer than the model's longest sequence, "
                f"{self.max_seq_len}."
            )
        self.max_seq_len = seq_len
        lora = job_config.lora
        self.lora_scale = lora.alpha / lora.rank if lora.rank else 0.0


def decoder_args(family: Family, config: dict[str, Any]) -> DecoderArgs:
    """Returns a decoder's arguments. Raises KeyError for a missing size, ValueError for unsupported RoPE."""
    layers = family.layers(config)
    return DecoderArgs(
        dim=config["hidden_size"],
        vocab_size=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        max_seq_len=config["max_position_embeddings"],
        enable_weight_tying=config.get("tie_word_embeddings", False),
        rotary=read_rotary(config, layers[0].attention.rotary_dim),
        layers=layers,
    )


class Decoder(nn.Module):
    """A decoder, or a pipeline stage, which lacks some layers and may lack embedding, norm and output."""

    tok_embeddings: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: nn.Linear | None
    rope_cache: torch.Tensor

    def __init__(self, model_args: DecoderArgs) -> None:
        super().__init__()
        self.model_args = model_args
        self.enable_weight_tying = model_args.enable_weight_tying
        dim, eps, vocab = model_args.dim, model_args.norm_eps, model_args.vocab_size
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.register_buffer("rope_cache", self._rotary_table(), persistent=False)
        blocks = (Block(row, number, eps) for number, row in enumerate(model_args.layers))
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.norm = nn.RMSNorm(dim, eps=eps)
        self.output = nn.Linear(dim, vocab, bias=False)
        if self.enable_weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def _rotary_table(self) -> torch.Tensor:
        return self.model_args.rotary.table(self.model_args.max_seq_len)

    def init_weights(self) -> None:
        with torch.device(self.rope_cache.device):
            self.rope_cache = self._rotary_table()
        if self.tok_embeddings is not None:
            nn.init.normal_(self.tok_embeddings.weight)
        for block in blocks_of(self):
            block.init_weights()
        if self.norm is not None:
            self.norm.reset_parameters()
        if self.output is not None:
            if self.enable_weight_tying and self.tok_embeddings is not None:
                # Leaving the meta device has undone the tie.
                self.output.weight = self.tok_embeddings.weight
            std = self.model_args.dim**-0.5
            truncated_normal_(self.output.weight, std, 3 * std)

    def decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, masks: Sequence[Mask]
    ) -> torch.Tensor:
        """Maps tokens, or hidden states on later stages. ``masks`` has one mask for each kind of layer."""
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        like = h if isinstance(h, torch.Tensor) else h[-1]  # Helix's parts get several tensors
        rotary = self.rope_cache[positions].unsqueeze(2).to(like.dtype)
        for number, block in self.layers.items():
            h = block(h, rotary, masks[self.model_args.layers.order[int(number)]])
        h = h if self.norm is None else self.norm(h)
        return h if self.output is None else self.output(h)


def blocks_of(model: nn.Module) -> list[Any]:
    """Returns the layers of a decoder or pipeline stage, with any wrappers around them."""
    return list(model.layers.values())  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


class OutputEmbedding(nn.Embedding):
    """Holds the weight of the last stage's output layer under the embedding's name."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hidden


def is_tied(model: nn.Module) -> bool:
    """Returns whether the model has tied embeddings. For a pipeline stage, this is about the whole model."""
    return bool(getattr(model, "enable_weight_tying", False))


def embeds_tokens(model: nn.Module) -> bool:
    """Returns whether the model, or this stage of it, takes tokens and not hidden states."""
    embeddings = model.tok_embeddings
    return embeddings is not None and not isinstance(embeddings, OutputEmbedding)


def hold_output_embedding(stage: nn.Module) -> None:
    """Adds an embedding that holds the output layer's weight to a tied model's last stage (on meta device)."""
    output: Any = stage.output
    vocab, dim = output.weight.shape
    stage.tok_embeddings = OutputEmbedding(vocab, dim, _weight=output.weight)
    stage.tok_embeddings.weight = output.weight


def tie_again(model: nn.Module) -> None:
    """Ties embedding and output layer after tensor parallelism has replaced the shared weight."""
    embeddings: Any = model.tok_embeddings
    output: Any = model.output
    if not is_tied(model) or embeddings is None or output is None:
        return
    if isinstance(embeddings, OutputEmbedding):  # not sharded
        embeddings.weight = output.weight
    else:
        output.weight = embeddings.weight
