"""Tiny Hugging Face models for tests of models and of training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# Few sizes divide evenly, and heads x head_dim is not the hidden size where that is allowed.
COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, str]]:
    """Makes ``llama``, ``qwen3`` or ``qwen3_tied``, and tells the directory it is saved in."""

    def make(kind: str, **sizes: Any) -> tuple[PreTrainedModel, str]:
        torch.manual_seed(0)
        if kind == "llama":
            config = LlamaConfig(tie_word_embeddings=False, **{"hidden_size": 48} | COMMON | sizes)
            model = LlamaForCausalLM(config)
        else:
            config = Qwen3Config(
                tie_word_embeddings=kind == "qwen3_tied",
                **{"hidden_size": 50, "head_dim": 16} | COMMON | sizes,
            )
            model = Qwen3ForCausalLM(config)
        folder = tmp_path / kind
        model.save_pretrained(folder)
        return model, str(folder)

    return make
