# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes the cost of training on a sequence: its tokens, or the operations of the model.

In packed rows attention stays inside each sequence, so the cost of a row is the sum over its
spans (`shared_context.py`). Norms, softmax, rotary embeddings and recomputed activations are
left out, and so is the fact that the output layer computes trained tokens only: they change little
of one sequence's cost relative to another's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class SequenceCost(Protocol):
    def __call__(self, num_tokens: int, num_before: int = 0) -> float:
        """Returns the cost of tokens of a sequence that follow ``num_before`` others.

        Each function has its own unit.
        """
        ...


_TRAINING = 3
"""Products in forward and backward pass: the backward pass computes two for each forward one."""


def token_cost(num_tokens: int, num_before: int = 0) -> float:
    return float(num_tokens)


@dataclass(frozen=True)
class FlopsCost:
    """FLOPs of one forward and backward pass over all layers.

    ``per_token`` are those of products with weights, ``per_pair`` those of a query and a key.
    """

    per_token: float
    per_pair: float

    def __call__(self, num_tokens: int, num_before: int = 0) -> float:
        pairs = num_tokens * (num_tokens + 1) / 2 + num_tokens * num_before
        return self.per_token * num_tokens + self.per_pair * pairs


def flops_cost(config: Mapping[str, Any]) -> FlopsCost:
    """Takes the ``config.json`` of a Llama or Qwen3 model; counts the experts that a token uses."""
    dim, num_layers = config["hidden_size"], config["num_hidden_layers"]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // num_heads
    heads = num_heads * head_dim
    kv_heads = (config.get("num_key_value_heads") or num_heads) * head_dim
    attention = dim * (2 * heads + 2 * kv_heads)
    weights = num_layers * (attention + _feed_forward(config, dim)) + dim * config["vocab_size"]
    # A multiplication is one operation and the addition of its result another. For each pair of
    # tokens attention multiplies once for the scores and once for the values.
    return FlopsCost(
        per_token=_TRAINING * 2.0 * weights, per_pair=_TRAINING * 4.0 * num_layers * heads
    )


def _feed_forward(config: Mapping[str, Any], dim: int) -> int:
    # transformers 5 writes `num_local_experts`, and version 4 `num_experts`.
    num_experts = config.get("num_local_experts") or config.get("num_experts")
    if not num_experts:
        return 3 * dim * config["intermediate_size"]
    active = config["num_experts_per_tok"]
    return dim * num_experts + active * 3 * dim * config["moe_intermediate_size"]
