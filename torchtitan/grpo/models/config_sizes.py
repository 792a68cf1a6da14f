# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Refuses sizes in a model's config.json that no model has, before anything is built from them."""

from typing import Any

_REQUIRED = {
    "hidden_size": 1_000_000,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 1_000_000_000,
}
"""Largest value of each size that every family has: far above any model, far below what hangs."""
_OPTIONAL = {
    "num_key_value_heads": 100_000,
    "head_dim": 1_000_000,
    "moe_intermediate_size": 10_000_000,
    "num_experts": 1_000_000,
    "num_local_experts": 1_000_000,
    "num_experts_per_tok": 1_000_000,
}


def wrong_size(config: dict[str, Any]) -> str | None:
    """Returns what is wrong with the sizes, as the end of a sentence; None if nothing is."""
    for key, largest in (_REQUIRED | _OPTIONAL).items():
        value = config.get(key)
        if value is None and key in _OPTIONAL:
            continue
        if type(value) is not int or not 1 <= value <= largest:
            return f"{key} must be a whole number from 1 to {largest}, got {_shown(value)}"
    epsilon = config.get("rms_norm_eps")
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        return f"rms_norm_eps must be a number between 0 and 1, got {_shown(epsilon)}"
    if type(tied := config.get("tie_word_embeddings", False)) is not bool:
        return f"tie_word_embeddings must be true or false, got {_shown(tied)}"
    if not isinstance(config.get("layer_types"), list | None):
        return f"layer_types must be a list or null, got {_shown(config['layer_types'])}"
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key), dict | None):
            return f"{key} must be an object or null, got {_shown(config[key])}"
    return None


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.80}"
