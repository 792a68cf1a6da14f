# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Adapters that cannot work are refused, with the keys to change."""

import pytest

from torchtitan.grpo.config_checks import ConfigError, check_model
from torchtitan.grpo.config_manager import load_config
from torchtitan.grpo.models.hf_config import read_hf_model

LIVE = [
    "--prompts.path=prompts.jsonl",
    "--reward.functions=exact_match",
    "--inference.launch",
    "--training.seq_len=32",
    "--rollout.max_new_tokens=8",
]
LORA = [*LIVE, "--lora.rank=4"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--lora.rank=0", "--lora.alpha=3"], "alpha needs lora.rank above 0"),
        (["--lora.target_modules=query"], r"q_proj, k_proj, .*got \['query'\]"),
        (["--lora.target_modules", "q_proj", "q_proj"], "name each layer once"),
        (["--grpo.kl_coef=0.1", "--grpo.ref_model_path=other"], "ref_model_path.*'other'"),
        (["--grpo.kl_coef=0.1", "--grpo.ref_model_ema=0.9"], "ref_model_ema"),
        (
            [
                "--checkpoint.enable",
                "--checkpoint.last_save_in_hf",
                "--checkpoint.last_save_model_only",
            ],
            "last_save_in_hf must be false",
        ),
        (["--checkpoint.enable", "--checkpoint.initial_load_path=x"], "initial_load_model_only"),
        (["--lora.push=adapters", "--weight_sync.delta"], "weight_sync.delta = True"),
    ],
)
def test_what_cannot_work_with_adapters_is_refused(settings, message, tmp_path):
    (tmp_path / "other").mkdir()
    settings = [s.replace("=other", f"={tmp_path}/other") for s in settings]
    with pytest.raises(ConfigError, match=message.replace("'other'", ".*other")):
        load_config([*LORA, "--model.hf_assets_path=model", *settings])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("qwen3", ["--lora.rank=33"], "rank must be at most 32 for k_proj"),
        ("qwen3_mixed", [], "must not name down_proj, gate_proj, up_proj"),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_refused(kind, settings, message, make_model):
    _, folder = make_model(kind, **({"mlp_only_layers": []} if kind == "qwen3_mixed" else {}))
    config = load_config([*LORA, f"--model.hf_assets_path={folder}", *settings])
    with pytest.raises(ConfigError, match=message):
        check_model(config, read_hf_model(folder))


def test_a_stage_without_adapters_is_refused(make_model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, folder = make_model("qwen3", num_hidden_layers=2)
    config = load_config(
        [
            *LORA, f"--model.hf_assets_path={folder}", "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_parallel_schedule=1F1B",
        ]
    )  # fmt: skip
    config.parallelism.module_fqns_per_model_part = [
        ["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"],
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="stage 0 has tok_embeddings alone"):
        check_model(config, read_hf_model(folder))
