# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The modules of HelixPipe's parts with weights (`helix.py`); torch is not imported."""

BEFORE_ATTENTION = (
    "attention_norm",
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.q_norm",
    "attention.k_norm",
)
"""Modules of a layer that belong to the part before its attention."""
AFTER_ATTENTION = ("attention.wo", "ffn_norm", "feed_forward")
"""Modules of a layer that belong to the part after its attention."""


def part_modules(num_layers: int) -> list[list[str]]:
    """Returns the names of the modules of each part with weights, ``num_layers`` + 1 of them."""
    parts: list[list[str]] = [[] for _ in range(num_layers + 1)]
    parts[0].append("tok_embeddings")
    for layer in range(num_layers):
        parts[layer] += [f"layers.{layer}.{name}" for name in BEFORE_ATTENTION]
        parts[layer + 1] += [f"layers.{layer}.{name}" for name in AFTER_ATTENTION]
    parts[-1] += ["norm", "output"]
    return parts
