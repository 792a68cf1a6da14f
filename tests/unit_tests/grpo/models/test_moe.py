"""Qwen3-MoE is the Hugging Face model, on a CPU and in every layout."""

import json
from pathlib import Path

import pytest
import torch
from hf_reference import ROWS, SEQUENCES, reference
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.moe import histogram

LAYOUTS = {
    1: {"one": {}, "one, compiled": {"compiled": True}},
    2: {
        "replicate2": {"dp_replicate": 2},
        "fsdp2 ep2, full AC": {"dp_shard": 2, "ep": 2, "ac": "full"},
        "cp2 ep2": {"cp": 2, "ep": 2},
        "tp2": {"tp": 2},
        "tp2 lent to ep2": {"tp": 2, "ep": 2},
    },
    4: {
        "hsdp2x2 ep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        "fsdp2 ep2 tp2": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
        "fsdp2 tp2 lent to ep4": {"dp_shard": 2, "tp": 2, "ep": 4},
    },
}


@pytest.fixture
def moe_model(tmp_path) -> tuple[Qwen3MoeForCausalLM, Path]:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=48,
        head_dim=16,  # pyright: ignore[reportCallIssue]
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        moe_intermediate_size=20,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.3,  # or the router hardly tells experts apart
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "moe")
    return model, tmp_path / "moe"


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_logprobs_and_gradients_are_hugging_faces(num_ranks, moe_model, run_ranks, tmp_path):
    model, folder = moe_model
    logprobs, gradients = reference(model)
    save_file(gradients, tmp_path / "gradients.safetensors")
    results = run_ranks(
        "family_layouts", num_ranks, model=str(folder), seq_len=12, sequences=SEQUENCES, rows=ROWS,
        gradients=str(tmp_path / "gradients.safetensors"), layouts=LAYOUTS[num_ranks],
    )  # fmt: skip
    for result in results:
        for name in LAYOUTS[num_ranks]:
            found = torch.tensor(result[name]["logprobs"])
            torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=1e-5, msg=name)
            wrong = {k: e for k, e in result[name]["gradient_errors"].items() if not e < 2e-5}
            assert not wrong, name


def test_weights_come_out_of_expert_parallelism_as_they_went_in(moe_model, run_ranks, tmp_path):
    layouts = {
        "fsdp2_tp2_ep2": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
        "pp2_fsdp2_ep2": {"pp": 2, "dp_shard": 2, "ep": 2, "schedule": "1F1B"},
    }
    cases = [
        {"name": name, "model": str(moe_model[1]), "layout": layout}
        for name, layout in layouts.items()
    ]
    for result in run_ranks("weights_in_out", 4, folder=str(tmp_path), cases=cases):
        for name in layouts:
            assert result[name]["wrongly_loaded"] == [], name
            for reach, wrong in result[name]["wrongly_gathered"].items():
                assert wrong == [], (name, reach)
            assert result[name]["wrongly_exported"] == [], name


def test_the_number_of_experts_is_read_in_either_spelling(moe_model):
    file = moe_model[1] / "config.json"
    config = json.loads(file.read_text())
    assert read_hf_model(file.parent).model_args.moe_args.num_experts == 8  # pyright: ignore
    config["num_experts"] = config.pop("num_local_experts", 8)
    file.write_text(json.dumps(config))
    assert read_hf_model(file.parent).model_args.moe_args.num_experts == 8  # pyright: ignore


def test_scores_of_chosen_experts_are_normalized_only_where_the_config_says_so(moe_model):
    file = moe_model[1] / "config.json"
    config = json.loads(file.read_text())
    del config["norm_topk_prob"]  # transformers takes it for false
    file.write_text(json.dumps(config))
    assert not read_hf_model(file.parent).model_args.moe_args.route_norm  # pyright: ignore


@pytest.mark.parametrize("num_experts", [8, 60, 128])
def test_experts_are_counted_exactly_on_a_cpu(num_experts):
    chosen = torch.randint(num_experts, (1000,))
    counts = histogram(chosen, bins=num_experts, min=0, max=num_experts)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, torch.bincount(chosen, minlength=num_experts))


def test_other_histograms_stay_as_they_are():
    values = torch.rand(100)
    assert torch.equal(histogram(values, bins=5, min=0, max=1), torch.histc(values, 5, 0, 1))
