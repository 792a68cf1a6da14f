# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which Hugging Face parameter names a server's own, fused parameters stand for."""

import re
from collections.abc import Collection, Iterable

# Checkpoint name -> the names that inference engines may hold the same weights under.
_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), (".qkv_proj.",)),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), (".experts.w13_weight",)),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), (".experts.w2_weight",)),
    (re.compile(r"\.(gate|up)_proj\."), (".gate_up_proj.",)),
)
# Tied models hold the output matrix as the embedding.
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def unknown_names(names: Iterable[str], held: Collection[str]) -> list[str]:
    """The Hugging Face names that none of the parameters ``held`` by a server stands for.

    Example:
        >>> unknown_names(["model.layers.0.self_attn.k_proj.weight", "typo.weight"],
        ...               {"model.layers.0.self_attn.qkv_proj.weight"})
        ['typo.weight']
    """
    return [name for name in names if not any(alias in held for alias in _aliases(name))]


def _aliases(name: str) -> Iterable[str]:
    yield name
    for pattern, fused in _FUSED:
        for replacement in fused:
            if pattern.search(name):
                yield pattern.sub(replacement, name)
    if name in _TIED:
        yield _TIED[name]
