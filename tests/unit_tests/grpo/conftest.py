"""Tiny Hugging Face models for tests of models and of training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# Few sizes divide evenly, and heads x head_dim is not the hidden size where that is allowed.
COMMON: dict[str, Any] = {
    "vocab_size": 61, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 77, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
SCALED: dict[str, Any] = {"rope_theta": 1e4, "original_max_position_embeddings": 16}
YARN = SCALED | {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = SCALED | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 20, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "initializer_range": 0.3,  # or the router hardly tells experts apart
}  # fmt: skip
LLAMA, QWEN2 = (LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)
QWEN3, TIED = (Qwen3Config, Qwen3ForCausalLM), {"tie_word_embeddings": True}
# For each kind of model: its classes, and what its configuration has beside the common sizes.
KINDS: dict[str, tuple[tuple[type, type], dict[str, Any]]] = {
    "llama": (LLAMA, {"hidden_size": 48}),
    "llama_tied": (LLAMA, {"hidden_size": 48, "rope_parameters": LLAMA3, **TIED}),
    "mistral": (
        (MistralConfig, MistralForCausalLM),
        {"hidden_size": 50, "head_dim": 16, "sliding_window": None},
    ),
    "qwen2": (QWEN2, {"hidden_size": 48}),
    "qwen2_tied": (QWEN2, {"hidden_size": 48, "rope_parameters": YARN, **TIED}),
    "qwen3": (QWEN3, {"hidden_size": 50, "head_dim": 16}),
    "qwen3_tied": (QWEN3, {"hidden_size": 50, "head_dim": 16, **TIED}),
    "qwen3_mixed": (
        (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        {"hidden_size": 48, "head_dim": 16, "mlp_only_layers": [1], **EXPERTS},
    ),
}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, str]]:
    """Makes a model of one of :data:`KINDS`, and tells the directory it is saved in."""

    def make(kind: str, **sizes: Any) -> tuple[PreTrainedModel, str]:
        torch.manual_seed(0)
        (make_config, make_model), further = KINDS[kind]
        model = make_model(make_config(**COMMON | further | sizes))
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # transformers begins with zeros
                torch.nn.init.normal_(parameter, std=0.2)
        folder = tmp_path / kind
        model.save_pretrained(folder)
        return model, str(folder)

    return make
