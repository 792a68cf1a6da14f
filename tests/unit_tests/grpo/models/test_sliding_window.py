# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A sliding window that no sequence reaches is harmless, and another one is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config_checks import check_model, load_config
from torchtitan.grpo.inference.embedded.__main__ import build_server, parse_arguments
from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.models.hf_config import ModelError, check_reference, read_hf_model

ASSETS = Path(__file__).resolve().parents[4] / "assets/reverse_digits"
ON = {"use_sliding_window": True, "sliding_window": 32, "layer_types": None}
MIXED = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "layer_types": None}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
# Changes of the shipped Qwen3 model with four layers, and the length that attention then reaches.
WINDOWS: list[tuple[dict[str, Any], int | None]] = [
    ({"sliding_window": 32, "use_sliding_window": False, "layer_types": None}, None),
    (ON | {"max_window_layers": 4}, None),
    (ON | {"max_window_layers": 3}, 32),
    (ON | {"max_window_layers": 0}, 32),
    (ON | {"layer_types": MIXED}, 32),
    (ON | {"layer_types": ["full_attention"] * 4}, None),
    (ON | {"sliding_window": None}, None),
    (QWEN2 | ON | {"max_window_layers": 1}, 32),
    (QWEN2 | {"sliding_window": 32, "layer_types": None}, None),
    (MISTRAL | {"sliding_window": 32}, 32),
    (MISTRAL | {"sliding_window": 32, "use_sliding_window": False}, 32),
    (MISTRAL | {"sliding_window": None}, None),
    (MISTRAL | {"sliding_window": ..., "max_position_embeddings": 8192}, 4096),
    (LLAMA | {"sliding_window": 32}, None),
]


@pytest.fixture
def folder(tmp_path: Path, repository: Path) -> Callable[..., Path]:
    """Makes a copy of the shipped model with other settings; those that are ... are missing."""

    def make(settings: dict[str, Any], name: str = "model") -> Path:
        path = Path(shutil.copytree(repository / "assets/reverse_digits/model", tmp_path / name))
        config = json.loads((path / "config.json").read_text()) | settings
        content = {key: value for key, value in config.items() if value is not ...}
        (path / "config.json").write_text(json.dumps(content))
        return path

    return make


def check(path: Path, seq_len: int, *more: str) -> None:
    given = [
        *(f"--model.hf_assets_path={path}", f"--prompts.path={ASSETS}/train.jsonl"),
        *("--reward.functions=exact_match", f"--training.seq_len={seq_len}", "--inference.launch"),
        *("--rollout.max_new_tokens=8", "--inference.kind=embedded", *more),
    ]
    config = load_config(given)
    check_model(config, read_hf_model(path))
    if config.grpo.kl_coef > 0:
        check_reference(config)


@pytest.mark.parametrize(("settings", "window"), WINDOWS)
def test_a_window_counts_where_transformers_has_one(settings, window, folder):
    path = folder(settings)
    assert read_hf_model(path).window == window
    check(path, window or 64)
    if window is not None:
        said = rf"at most {window} tokens .*sliding_window in .*, got {window + 1}"
        with pytest.raises(ConfigError, match=said):
            check(path, window + 1)


@pytest.mark.parametrize(
    ("more", "got"),
    [
        (["--inference.max_model_len=33"], 33),
        (["--prompts.max_prompt_tokens=25"], 64),  # the servers' length
        (["--prompts.max_prompt_tokens=25", "--inference.max_model_len=34"], 34),
        (["--inference.no-launch", "--inference.urls=http://127.0.0.1:1"], 64),
        (["--rollout.max_new_tokens=60"], 64),
    ],
)
def test_a_length_that_reaches_beyond_the_window_is_refused_with_both_numbers(more, got, folder):
    seq_len = 32 if got == 33 else 64
    with pytest.raises(ConfigError, match=rf"most 32 tokens .*got {got}\. Lower training.seq_len"):
        check(folder(MISTRAL | {"sliding_window": 32}), seq_len, *more)


def test_short_sequences_are_packed_into_longer_rows_and_a_reference_has_the_same_window(folder):
    policy = folder(MISTRAL | {"sliding_window": 32})
    check(policy, 64, "--prompts.max_prompt_tokens=24", "--inference.max_model_len=32")
    reference = folder(MISTRAL | {"sliding_window": 16}, "reference")
    with pytest.raises(ModelError, match="sliding_window 16 instead of 32"):
        check(policy, 32, "--grpo.kl_coef=0.1", f"--grpo.ref_model_path={reference}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (MISTRAL | {"sliding_window": 0}, "sliding_window must be null or .* got 0"),
        (MISTRAL | {"sliding_window": "4096"}, "got '4096'"),
        (ON | {"sliding_window": True}, "got True"),
        (ON | {"max_window_layers": "all"}, "max_window_layers must be a whole number, got 'all'"),
        ({"layer_types": MIXED, "sliding_window": 32}, "needs sliding_window, and use_sliding"),
        (LLAMA | {"layer_types": MIXED}, "needs sliding_window, and use_sliding"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types must be 'full_attention' or"),
        ({"layer_types": [None, "full_attention", 3, {}]}, "layer_types must be .* got None"),
        ({"layer_types": "sliding_attention"}, "layer_types must be a list"),
    ],
)
def test_windows_that_contradict_themselves_are_refused_by_name(settings, message, folder):
    with pytest.raises(ModelError, match=message):
        read_hf_model(folder(settings))


@pytest.mark.parametrize(
    "settings",
    [MISTRAL | {"sliding_window": 32}, ON | {"max_window_layers": 0}, ON | {"layer_types": MIXED}],
)
async def test_the_embedded_server_computes_the_model_up_to_its_window(settings, folder):
    path = folder(settings)
    ids = torch.arange(3, 35)[None]
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    served: Any = load_model(str(path), "cpu", "float32")
    with torch.no_grad():
        torch.testing.assert_close(served(ids).logits, own(ids).logits)
    arguments = ["--model-path", str(path), "--host", "127.0.0.1", "--port", "0"]
    assert build_server(parse_arguments(arguments))._info["max_model_len"] == 32
    with pytest.raises(ValueError, match=r"--max-model-len must be at most 32, .*sliding_window"):
        build_server(parse_arguments([*arguments, "--max-model-len", "33"]))
