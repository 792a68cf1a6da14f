# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a sequence costs to train on: its tokens, or the operations of the model.

Matrix products cost the same for each token; causal attention costs as much as there are
pairs of tokens, about half the square of the length. In packed rows attention stays inside
each sequence, so a row costs what its sequences cost.

Left out, since they change little of what one sequence costs against another: norms, softmax,
rotary embeddings, the recomputation of activations, and that the output layer works on
trained tokens alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SequenceCost = Callable[[int], float]
"""From a sequence's tokens to its cost, in a unit of the function's own."""

_TRAINING = 3
"""A backward pass computes two products, for inputs and for weights, to the forward's one."""


def token_cost(num_tokens: int) -> float:
    """A token costs 1."""
    return float(num_tokens)


@dataclass(frozen=True)
class FlopsCost:
    """Floating-point operations of one forward and backward pass.

    Attributes:
        per_token: Operations of a token in all products with weights.
        per_pair: Operations of a query and a key that it sees, over all layers.
    """

    per_token: float
    per_pair: float

    def __call__(self, num_tokens: int) -> float:
        pairs = num_tokens * (num_tokens + 1) / 2
        return self.per_token * num_tokens + self.per_pair * pairs


def flops_cost(config: Mapping[str, Any]) -> FlopsCost:
    """The cost of a model's sequences.

    Args:
        config: A Hugging Face ``config.json`` of a Llama or Qwen3, dense or with experts, of
            which a token counts those that it is sent to.
    """
    dim, num_layers = config["hidden_size"], config["num_hidden_layers"]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // num_heads
    heads = num_heads * head_dim
    kv_heads = (config.get("num_key_value_heads") or num_heads) * head_dim
    attention = dim * (2 * heads + 2 * kv_heads)
    weights = num_layers * (attention + _feed_forward(config, dim)) + dim * config["vocab_size"]
    # A product of a weight, or of a query's, key's or value's number, is an operation, and so
    # is its addition; a pair of tokens has a product in the scores and one in the values.
    return FlopsCost(
        per_token=_TRAINING * 2.0 * weights, per_pair=_TRAINING * 4.0 * num_layers * heads
    )


def _feed_forward(config: Mapping[str, Any], dim: int) -> int:
    """Weights that a token meets in one layer's gated feed-forward, or in its experts."""
    # transformers 5 writes `num_local_experts`, 4 wrote `num_experts`.
    num_experts = config.get("num_local_experts") or config.get("num_experts")
    if not num_experts:
        return 3 * dim * config["intermediate_size"]
    active = config["num_experts_per_tok"]
    return dim * num_experts + active * 3 * dim * config["moe_intermediate_size"]
