# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The names under which inference engines hold the parameters of a Hugging Face checkpoint."""

import re
from collections.abc import Collection, Iterable
from typing import Any

# Pattern of a checkpoint name, and the names of the fused parameters that may hold the weights.
_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), (".qkv_proj.",)),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), (".experts.w13_weight",)),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), (".experts.w2_weight",)),
    (re.compile(r"\.(gate|up)_proj\."), (".gate_up_proj.",)),
)
# A model with tied embeddings holds the output matrix as its embedding.
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def unknown_names(names: Iterable[str], held: Collection[str]) -> list[str]:
    """Returns the Hugging Face names that belong to none of the parameters that a server holds.

    Example:
        >>> unknown_names(["model.layers.0.self_attn.k_proj.weight", "typo.weight"],
        ...               {"model.layers.0.self_attn.qkv_proj.weight"})
        ['typo.weight']
    """
    return [name for name in names if not any(alias in held for alias in _aliases(name))]


def checksum_names(body: Any) -> frozenset[str]:
    """Returns the parameter names of all ranks in an answer of ``/weights_checker``."""
    ranks = body.get("ranks") if isinstance(body, dict) else None
    named = (rank.get("checksums", ()) for rank in ranks or () if isinstance(rank, dict))
    return frozenset(name for names in named for name in names)


def _aliases(name: str) -> Iterable[str]:
    yield name
    for pattern, fused in _FUSED:
        for replacement in fused:
            if pattern.search(name):
                yield pattern.sub(replacement, name)
    if name in _TIED:
        yield _TIED[name]
