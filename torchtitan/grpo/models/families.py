# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The model families: one row for each architecture in ``config.json``.

A family chooses the blocks of each layer (`blocks/parts.py`). Torch is not imported.
See `docs/how-to/extend.md`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.models.blocks.parts import (
    FeedForward,
    GatedFeedForward,
    GroupedAttention,
    Layer,
    Layers,
    RoutedExperts,
)

# Values that all families need. A key that config.json lacks is accepted.
_REFUSED_OTHERWISE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}


@dataclass(frozen=True)
class Family:
    qk_norm: bool = False
    qkv_bias: bool = False
    has_experts: bool = False

    def layers(self, config: Mapping[str, Any]) -> Layers:
        """Returns the layers that a ``config.json`` describes. Raises KeyError if a size is missing."""
        attention = self._attention(config)
        return Layers.of([Layer(attention, part) for part in self._feed_forwards(config)])

    def _attention(self, config: Mapping[str, Any]) -> GroupedAttention:
        num_heads, dim = config["num_attention_heads"], config["hidden_size"]
        return GroupedAttention(
            dim=dim,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or dim // num_heads,
            has_qk_norm=self.qk_norm,
            has_bias=self.qkv_bias,
        )

    def _feed_forwards(self, config: Mapping[str, Any]) -> Iterator[FeedForward]:
        every, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        for number in range(config["num_hidden_layers"]):
            if not self.has_experts or number in listed or (number + 1) % every:
                yield GatedFeedForward(config["hidden_size"], config["intermediate_size"])
                continue
            yield RoutedExperts(
                dim=config["hidden_size"],
                expert_hidden=config["moe_intermediate_size"],
                # transformers 5 writes `num_local_experts`; version 4 wrote `num_experts`.
                num_experts=config.get("num_local_experts") or config["num_experts"],
                top_k=config["num_experts_per_tok"],
                normalizes=config.get("norm_topk_prob", False),
            )


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, has_experts=True),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a ``config.json``, or Llama's if the file names no known architecture."""
    named = config.get("architectures") or [""]
    return FAMILIES.get(named[0], FAMILIES["LlamaForCausalLM"])


def refusals(config: dict[str, Any]) -> list[str]:
    """Returns a sentence for each setting of a ``config.json`` that no family supports."""
    return [
        f"{key} = {config[key]!r} is not supported, only {key} = {allowed[0]!r} is."
        for key, allowed in _REFUSED_OTHERWISE.items()
        if key in config and config[key] not in allowed
    ]
