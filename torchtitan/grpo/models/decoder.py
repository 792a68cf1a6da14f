# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Upstream's Qwen3 model with the parts that other families need: one model for all of them.

It holds the weights exactly as Hugging Face directories do, so that a push only renames them.
"""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn as nn

from torchtitan.grpo.config import LoRA
from torchtitan.grpo.models.rotary import Rotary
from torchtitan.grpo.upstream.configuration import JobConfig
from torchtitan.grpo.upstream.models import (
    Qwen3Model,
    Qwen3ModelArgs,
    Qwen3StateDictAdapter,
    TransformerBlock,
)

_QKV = (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"))


@dataclass
class DecoderArgs(Qwen3ModelArgs):
    """Arguments of :class:`Decoder`.

    Attributes:
        qkv_bias: Whether the projections of queries, keys and values have biases.
        rotary: The rotary embedding. Upstream's ``rope_theta`` is not read.
        dense_layers: Numbers of the layers without experts, if ``moe_enabled``.
        lora_scale: ``lora.alpha / lora.rank``, with which adapters are added to their targets.
    """

    qkv_bias: bool = False
    rotary: Rotary = field(default_factory=lambda: Rotary(1e4, "default", ()))
    dense_layers: tuple[int, ...] = ()
    lora_scale: float = 0.0

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Takes over what the configuration decides about the model."""
        super().update_from_config(job_config, **kwargs)
        lora: LoRA = job_config.lora  # pyright: ignore[reportAttributeAccessIssue]
        self.lora_scale = lora.alpha / lora.rank if lora.rank else 0.0


class Decoder(Qwen3Model):
    """Upstream's model with biases, scaled rotary embeddings, and dense layers among sparse ones."""

    model_args: DecoderArgs

    def __init__(self, model_args: DecoderArgs) -> None:
        super().__init__(model_args)
        dense = replace(model_args, moe_enabled=False)
        for layer in model_args.dense_layers:
            self.layers[str(layer)] = TransformerBlock(layer, dense)
        if model_args.qkv_bias:
            for projection in self._biased():
                projection.bias = nn.Parameter(torch.empty(projection.out_features))

    def _biased(self) -> list[nn.Linear]:
        if not self.model_args.qkv_bias:
            return []
        blocks: list[Any] = list(self.layers.values())
        return [getattr(block.attention, name) for block in blocks for name, _ in _QKV]

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initializes as upstream does; biases begin at zero."""
        tied = self.enable_weight_tying
        # Leaving the meta device has undone the tie, which upstream restores, but a stage of a
        # pipeline may have one of the two layers, or none.
        self.enable_weight_tying = tied and None not in (self.tok_embeddings, self.output)
        super().init_weights(cast(torch.device, buffer_device))
        self.enable_weight_tying = tied
        for projection in self._biased():
            nn.init.zeros_(projection.bias)

    def _precompute_rope_cache(self) -> torch.Tensor:
        return self.model_args.rotary.table(self.model_args.max_seq_len)


class DecoderAdapter(Qwen3StateDictAdapter):
    """Upstream's adapter between native and Hugging Face names, with the names of biases."""

    def __init__(self, model_args: DecoderArgs, hf_assets_path: str | None) -> None:
        # Upstream would read the directory's index, and fails if that names no numbered files.
        super().__init__(model_args, None)
        self.hf_assets_path = hf_assets_path
        for native, hf in _QKV:
            hf_name = f"model.layers.{{}}.self_attn.{hf}.bias"
            self.from_hf_map[hf_name] = f"layers.{{}}.attention.{native}.bias"
