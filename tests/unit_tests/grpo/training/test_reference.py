"""The reference scores as its weights say, follows the policy, moves, and is checkpointed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_config import ModelError, check_reference
from torchtitan.grpo.training.reference import Reference
from torchtitan.grpo.training.runner import ForwardRunner

CPU = torch.device("cpu")
SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
ROWS = [[0, 1], [2, 3], [], []]
CASES = {
    "fsdp2": ("qwen3_tied", {"dp_shard": 2, "ac": "full"}),
    "replicate2": ("qwen3", {"dp_replicate": 2}),
    "tp2": ("qwen3_tied", {"tp": 2}),
    "pp2_zbv": ("llama", {"pp": 2, "schedule": "ZBVZeroBubble"}),
}


def perturbed(model: PreTrainedModel, folder: str, target: Path) -> str:
    """The same model with other weights, in a directory of its own."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    shutil.copytree(folder, target)
    model.save_pretrained(target)
    return str(target)


def completion_logprobs(model: Any) -> torch.Tensor:
    """Of each sequence's trained tokens, scored one by one."""
    logprobs = []
    for ids in SEQUENCES:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, 1:-1]
        labels = torch.tensor(ids[2:])[:, None]  # the first two tokens are the prompt
        logprobs.append(logits.log_softmax(-1).gather(1, labels)[:, 0])
    return torch.cat(logprobs)


def test_a_sharded_reference_scores_follows_and_is_restored(make_model, run_ranks, tmp_path):
    policies, references, expected = {}, {}, {}
    for kind in {kind for kind, _ in CASES.values()}:
        model, policies[kind] = make_model(kind, intermediate_size=78)
        references[kind] = perturbed(model, policies[kind], tmp_path / f"{kind}-reference")
        expected[kind] = completion_logprobs(model)
    lacking = shutil.copytree(references["qwen3_tied"], tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacking / "model.safetensors")
    results = run_ranks(
        "reference_ranks", 2, seq_len=12, sequences=SEQUENCES, rows=ROWS, folder=str(tmp_path),
        cases=[
            {"name": name, "policy": policies[kind], "reference": references[kind], "layout": layout}
            for name, (kind, layout) in CASES.items()
        ],
        refused=[str(lacking), references["llama"]],
    )  # fmt: skip
    for name, (kind, _) in CASES.items():
        assert any(result[name]["has_output"] for result in results)
        for rank, result in enumerate(results):
            found, label = result[name], f"{name} on rank {rank}"
            if found["has_output"]:
                logprobs = torch.tensor(found["logprobs"])[torch.tensor(found["mask"])]
                torch.testing.assert_close(logprobs, expected[kind], atol=1e-5, rtol=1e-5)
            assert found["wrongly_followed"] == found["wrongly_restored"] == [], label
            assert found["num_changed"] > 2 and found["scores_as_saved"], label
    for result in results:
        missing, other = result["refusals"]
        assert "The weights in grpo.ref_model_path" in missing
        assert "architecture LlamaForCausalLM instead of Qwen3ForCausalLM" in other
        assert "model.hf_assets_path" not in missing


class ToyRunner(ForwardRunner):
    has_output = True

    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def forward(self, rows: Any) -> torch.Tensor:
        return self.part(rows)


class MovingReference(Reference):
    """Moves as between two devices, on one: parameters get other memory."""

    moves: list[str]

    def _move(self, device: torch.device) -> None:
        self.moves = [*getattr(self, "moves", []), device.type]
        for part in self.parts:
            part._apply(torch.clone)


def moving_reference(parts: list[nn.Module]) -> MovingReference:
    # Where forwards would run is only written down: nothing is put there.
    return MovingReference(ToyRunner(parts[0]), parts, torch.device("meta"), ema=0.5, offload=True)


def test_an_offloaded_reference_comes_to_the_device_and_leaves_it_again():
    part = nn.Linear(2, 2)
    reference = moving_reference([part])
    assert reference.moves == ["cpu"]
    inputs = torch.ones(1, 2)
    assert torch.equal(reference.forward(inputs), part(inputs))
    assert reference.moves == ["cpu", "meta", "cpu"]
    reference.follow([nn.Linear(2, 2)])
    assert reference.moves == ["cpu", "meta", "cpu", "meta", "cpu"]


def two_stages() -> list[nn.Module]:
    return [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in ("first", "second")]


def weights(parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for part in parts for name, p in part.named_parameters()}


# A checkpoint of a single process says that it is one.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_saved_and_loaded_into_the_parameters_that_there_are_after_a_move(tmp_path):
    parts, policy = two_stages(), two_stages()
    reference = moving_reference(parts)
    # Made before the run's first move, as the trainer does.
    state, start = reference.checkpoint_state(), weights(parts)
    reference.follow(policy)
    kept, target = weights(parts), weights(policy)
    for name, tensor in state["reference"].state_dict().items():
        torch.testing.assert_close(tensor, (start[name] + target[name]) / 2)
    dcp.save(dict(state), checkpoint_id=tmp_path)
    reference.follow(policy)
    assert not torch.equal(weights(parts)["first.weight"], kept["first.weight"])
    dcp.load(dict(state), checkpoint_id=tmp_path)
    restored = weights(parts)
    assert all(torch.equal(restored[name], kept[name]) for name in kept)


def test_a_reference_that_follows_nobody_is_not_checkpointed_and_keeps_its_weights():
    part, policy = nn.Linear(2, 2), nn.Linear(2, 2)
    reference = Reference(ToyRunner(part), [part], CPU, ema=0.0, offload=True)
    before = part.weight.detach().clone()
    reference.follow([policy])
    assert torch.equal(part.weight, before)
    assert reference.checkpoint_state() == {}


def check(policy: str, reference: str | None) -> None:
    config = JobConfig()
    config.model.hf_assets_path = policy
    config.grpo.ref_model_path = reference
    check_reference(config)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("qwen3", {"rope_theta": 5e5}, r"rope_theta 500000\.0 instead of 10000\.0"),
        ("llama", {"intermediate_size": 96}, "intermediate_size 96 instead of 77"),
        ("qwen3", {"num_hidden_layers": 2}, "num_hidden_layers 2 instead of 3"),
        ("llama", {"rms_norm_eps": 1e-3}, r"rms_norm_eps 0\.001 instead of 1e-06"),
        ("llama", {"rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        }}, r"rope_scaling llama3 \(factor = 8\.0.* instead of default"),
    ],
)  # fmt: skip
def test_a_reference_that_computes_otherwise_is_refused(
    make_model, tmp_path, kind, changed, message
):
    reference = tmp_path / "reference"
    shutil.move(make_model(kind, **changed)[1], reference)
    policy = make_model(kind)[1]
    with pytest.raises(ModelError, match=rf"^grpo\.ref_model_path .*{message}"):
        check(policy, str(reference))


def test_a_reference_made_for_other_lengths_is_used_and_an_unreadable_one_is_named(
    make_model, tmp_path
):
    reference = tmp_path / "reference"
    shutil.move(make_model("qwen3", max_position_embeddings=128)[1], reference)
    policy = make_model("qwen3")[1]
    check(policy, str(reference))
    check(policy, None)
    with pytest.raises(ModelError, match=r"^grpo\.ref_model_path must be a readable"):
        check(policy, str(tmp_path))
