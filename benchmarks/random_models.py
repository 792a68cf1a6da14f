# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes Qwen3 models of a given size with random weights, for benchmarks."""

import os
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 512

SIZES: dict[str, dict[str, Any]] = {
    "0.1M": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "heads": 2},
    "1M": {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 2, "heads": 2},
    "5M": {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 2, "heads": 6},
    "4 layers": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "heads": 4},
    "8 layers": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "heads": 4},
    "30M": {"hidden_size": 704, "intermediate_size": 2176, "num_hidden_layers": 5, "heads": 8},
    "106M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "heads": 8},
    "120M": {"hidden_size": 1408, "intermediate_size": 4480, "num_hidden_layers": 5, "heads": 16},
}
"""Sizes by name. The parameters are in few, wide layers, so that a step computes rather than waits
for gloo. Pipelines need more layers."""


def make_model(folder: Path, size: str) -> tuple[Path, int]:
    """Writes a Hugging Face directory in float32, with a tokenizer of one word per token.

    Returns:
        The path of the directory, and the number of the model's parameters.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = dict(SIZES[size])
    heads = shape.pop("heads")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **shape,
            vocab_size=VOCAB_SIZE,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            eos_token_id=0,
            dtype="float32",
        )
    ).float()
    path = folder / f"model-{size}"
    model.save_pretrained(path)
    vocabulary = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(path)
    return path, sum(p.numel() for p in model.parameters())
