# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The critic's values and gradients in every kind of layout, and what its directory may hold."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import ARGUMENTS, PROMPTS, SEQUENCES, gradients_of
from safetensors.torch import load_file, save_file

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_config import ModelError, check_critic_model, read_hf_model
from torchtitan.grpo.models.packed_model import ValueHead
from torchtitan.grpo.training.model_spec import check_weights

CASES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "fsdp2, bfloat16": ("qwen3_tied", {"dp_shard": 2, "precision": "bfloat16"}),
        "replicate2": ("qwen3_tied", {"dp_replicate": 2}),
        "tp2": ("qwen3_tied", {"tp": 2}),
        "cp2": ("qwen3_tied", {"cp": 2}),
        "pp2, ZBV": ("qwen3_tied", {"pp": 2, "schedule": "ZBVZeroBubble"}),
        "fsdp2 ep2, full AC": ("qwen3_mixed", {"dp_shard": 2, "ep": 2, "ac": "full"}),
    },
    4: {
        "pp4, 1F1B": ("qwen3_tied", {"pp": 4}),
        "hsdp2x2": ("qwen3_tied", {"dp_replicate": 2, "dp_shard": 2}),
        "fsdp2 tp2": ("qwen3_tied", {"dp_shard": 2, "tp": 2}),
        "fsdp2 pp2": ("qwen3_tied", {"dp_shard": 2, "pp": 2, "schedule": "Interleaved1F1B"}),
        "tp2 pp2": ("qwen3_tied", {"tp": 2, "pp": 2, "schedule": "VHalf"}),
    },
}


def with_score(folder: str, target: Path, dim: int) -> torch.Tensor:
    """Makes a reward model's directory of a model's, and returns the weight of its head."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    head = torch.randn(1, dim, generator=torch.Generator().manual_seed(3))
    save_file(tensors | {"score.weight": head}, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    named = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    (target / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    return head


def expected_of(model: Any, head: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Values of the trained tokens, sequence by sequence, and gradients by names of the directory."""
    head = head.clone().requires_grad_()
    values = []
    for ids, num_prompt in zip(SEQUENCES, PROMPTS, strict=True):
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        values.append((hidden @ head[0])[num_prompt - 1 : -1])
    found = torch.cat(values)
    model.zero_grad()
    (0.5 * (found - 0.5).square()).sum().backward()
    assert head.grad is not None
    return found.detach(), gradients_of(model) | {"score.weight": head.grad}


# With four ranks, the kinds of layout that two ranks show one by one are combined.
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_values_gradients_and_norm_are_hugging_faces(
    num_ranks: int, make_model, run_ranks, tmp_path
):
    cases, expected = [], {}
    for kind in sorted({kind for kind, _ in CASES[num_ranks].values()}):
        # Tensor parallelism needs a width that divides.
        model, folder = make_model(kind, num_hidden_layers=2 * num_ranks, intermediate_size=78)
        head = with_score(folder, tmp_path / f"{kind}-critic", model.config.hidden_size)
        expected[kind] = expected_of(model, head)
        save_file(expected[kind][1], tmp_path / f"{kind}.safetensors")
        cases += [
            {"name": name, "policy": folder, "critic": str(tmp_path / f"{kind}-critic"),
             "gradients": str(tmp_path / f"{kind}.safetensors"), "layout": layout}
            for name, (of_case, layout) in CASES[num_ranks].items() if of_case == kind
        ]  # fmt: skip
    results = run_ranks("critic_layouts", num_ranks, **ARGUMENTS, cases=cases)
    for name, (kind, layout) in CASES[num_ranks].items():
        values, gradients = expected[kind]
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        # Hidden states are rounded to 8 bits, block by block.
        bound = 0.1 if layout.get("precision") == "bfloat16" else 2e-5
        of_ranks = [result[name] for result in results]
        assert any(found["values"] for found in of_ranks), name
        for found in of_ranks:
            if found["values"] is not None:
                distance = (torch.tensor(found["values"]) - values).norm() / values.norm()
                assert distance < bound, name
            assert found["elsewhere"] == 0.0
            assert not {k: e for k, e in found["gradient_errors"].items() if not e < bound}, name
            assert found["norm"] == pytest.approx(norm, rel=bound), name
            assert set(found["head_dtypes"]) <= {"torch.float32"}
        heads = {round(head, 9) for found in of_ranks for head in found["stepped_head"]}
        assert len(heads) == 1, f"{name}: all copies of the head take the same step"


def config_of(policy: str, critic: Path | str | None) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path, config.grpo.advantage = policy, "gae"
    config.critic.path = None if critic is None else str(critic)
    return config


def test_a_critic_is_another_checkpoint_of_the_policys_model_or_a_reward_model_made_of_it(
    make_model, tmp_path
):
    model, tied = make_model("qwen3_tied")
    _, other = make_model("llama")
    with_score(tied, tmp_path / "scored", model.config.hidden_size)
    for path in (None, tied, tmp_path / "scored"):
        check_critic_model(config_of(tied, path))
        check_weights(config_of(tied, path), read_hf_model(tied))
    with pytest.raises(ModelError, match="architecture LlamaForCausalLM instead of Qwen3"):
        check_critic_model(config_of(tied, other))

    tensors = load_file(tmp_path / "scored/model.safetensors")
    two_outputs = {"score.weight": torch.zeros(2, model.config.hidden_size)}
    save_file(tensors | two_outputs, tmp_path / "scored/model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"score.weight in .* \(critic.path\) must have shape \[1,"
    ):
        check_weights(config_of(tied, tmp_path / "scored"), read_hf_model(tied))
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "scored/model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"The weights in critic.path .* lack the tensor"):
        check_weights(config_of(tied, tmp_path / "scored"), read_hf_model(tied))


def test_a_value_head_scores_the_tokens_that_are_scored_in_float32():
    head = ValueHead(torch.nn.Linear(8, 31, bias=False))
    hidden, positions = torch.randn(2, 5, 8), torch.tensor([1, 4, 7])
    with head.labeled(torch.zeros(2, 5, dtype=torch.int64), positions):
        found = head(hidden.bfloat16())
    assert found.dtype == torch.float32 and found.shape == (2, 5, 1)
    expected = torch.zeros(10)
    expected[positions] = (hidden.bfloat16().float() @ head.weight[0]).flatten()[positions]
    torch.testing.assert_close(found.flatten(), expected)
    assert head(hidden).shape == (2, 5, 1)
