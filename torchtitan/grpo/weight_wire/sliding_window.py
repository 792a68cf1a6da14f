# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tells how many tokens a model's attention reaches, as transformers reads ``config.json``.

A window that is not shorter than the sequences changes nothing. Neither the trainer nor the
embedded server computes a shorter one.
"""

from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"
# What transformers takes where config.json has no value.
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28


def attention_window(config: dict[str, Any], architecture: str) -> int | None:
    """Returns the number of tokens, its own included, that each token attends to; None for all.

    Mistral's models have a window unless it is null, and others only with
    ``use_sliding_window``; dense ones in the layers that ``layer_types`` or
    ``max_window_layers`` tell.

    Raises ValueError if the settings contradict each other.
    """
    kinds = config.get("layer_types") or []
    if unknown := [kind for kind in kinds if kind not in (_FULL, _SLIDING)]:
        raise ValueError(f"layer_types must be {_FULL!r} or {_SLIDING!r}, got {unknown[0]!r:.80}.")
    is_mistral = architecture == "MistralForCausalLM"
    is_switched_on = config.get("use_sliding_window", False)
    window = config.get("sliding_window", _WINDOW) if is_mistral or is_switched_on else None
    if window is None:
        if _SLIDING in kinds:
            raise ValueError(
                f"layer_types with {_SLIDING!r} needs sliding_window, and use_sliding_window = true in "
                f"models that have it, got sliding_window = {config.get('sliding_window')!r} and "
                f"use_sliding_window = {is_switched_on!r}. Correct the file."
            )
        return None
    if type(window) is not int or window < 1:
        raise ValueError(
            f"sliding_window must be null or a number of tokens above 0, got {window!r}."
        )
    if is_mistral or "Moe" in architecture:
        return window  # in all layers
    if kinds:
        return window if _SLIDING in kinds else None
    first = config.get("max_window_layers", _MAX_WINDOW_LAYERS)
    if type(first) is not int:
        raise ValueError(f"max_window_layers must be a whole number, got {first!r}.")
    return window if first < config["num_hidden_layers"] else None
