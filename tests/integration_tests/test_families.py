"""Models of other families are served, after ten pushes, as the trainer has them."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "programs"))

from listening import check_sockets, run_watched

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
KINDS: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"original_max_position_embeddings": 256},
        },
    ),
    "llama": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 256},
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 32, "sliding_window": None}),
}


def make_family(kind: str, folder: Path, tokenizer: Path) -> Path:
    """Writes a random model of a family, with the tokenizer of another directory."""
    make_config, make_model, further = KINDS[kind]
    torch.manual_seed(0)
    model = make_model(make_config(**SIZES | {"tie_word_embeddings": False} | further)).float()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # transformers begins with zeros
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "kind"),
    [
        # Other tests of the short suite load a Qwen3 into every kind of server.
        ("embedded", "qwen2"),
        *(
            pytest.param(server, kind, marks=[pytest.mark.long, *marks])
            for server, marks in (
                ("vllm", [pytest.mark.vllm]),
                ("sglang", [pytest.mark.sglang]),
                ("embedded", []),
            )
            for kind in KINDS
            if (server, kind) != ("embedded", "qwen2")
        ),
    ],
)
def test_a_family_is_served_as_the_trainer_has_it(
    server: str, kind: str, repository: Path, tmp_path: Path
):
    model = make_family(kind, tmp_path / kind, repository / "assets/reverse_digits/model")
    script = str(repository / "scripts/verify_grpo_cpu.sh")
    result, found = run_watched(["bash", script, "--server", server, "--model", str(model)])
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.count("\nok ") == 6
    assert f"verified: {server} serves the trainer's weights" in result.stdout
    check_sockets(found)
    log = repository / f"outputs/verify-cpu-{server}-{kind}/server.log"
    assert log.stat().st_mode & 0o777 == 0o600
