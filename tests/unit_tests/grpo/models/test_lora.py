"""Adapters are PEFT's, in one process and in every kind of layout, also beside experts."""

import copy
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hf_reference import ARGUMENTS, reference
from peft_reference import peft_model
from safetensors.torch import load_file, save_file

from torchtitan.grpo.models.lora import begin_adapters

LORA = {"rank": 3, "alpha": 5.0}
# Norms of the adapters with which runs begin, by layer, as the first layout has found them.
BEGUN: dict[str, float] = {}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "checkpointed": {"ac": "full"}, "base in bfloat16": {"base_dtype": "bfloat16"}},
    2: {
        "fsdp2": {"dp_shard": 2},
        "tp2": {"tp": 2},
        "cp2": {"cp": 2},
        "pp2": {"pp": 2, "schedule": "1F1B"},
        "pp2 in a V": {"pp": 2, "schedule": "ZBVZeroBubble"},
    },
    4: {
        "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
        "fsdp2 pp2 in a V": {"dp_shard": 2, "pp": 2, "schedule": "VHalf", "ac": "full"},
        "fsdp2 tp2": {"dp_shard": 2, "tp": 2, "base_dtype": "bfloat16"},
        "tp2 pp2 in a V": {"tp": 2, "pp": 2, "schedule": "ZBVZeroBubble"},
    },
}


BESIDE_EXPERTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp2 ep2": {"dp_shard": 2, "ep": 2, "base_dtype": "bfloat16"},
        "cp2 ep2": {"cp": 2, "ep": 2},
        "tp2": {"tp": 2},
        "tp2 lent to ep2": {"tp": 2, "ep": 2, "ac": "full"},
    },
    4: {
        "hsdp2x2 ep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        "fsdp2 ep2 tp2": {"dp_shard": 2, "tp": 2, "ep": 2},
        "pp2 fsdp2 ep2": {"pp": 2, "dp_shard": 2, "ep": 2, "schedule": "1F1B"},
    },
}
OF_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MEASURED = {"pp2 as measured": {"pp": 2, "schedule": "auto"}}
COMPILED = {"pp2 in a V": {"pp": 2, "schedule": "ZBVZeroBubble", "compiled": True}}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("qwen3_tied", LAYOUTS[1]),
        ("qwen3_tied", LAYOUTS[2]),
        pytest.param("qwen3_tied", LAYOUTS[4], marks=pytest.mark.long),
        ("qwen2", {"one": {}}),
        pytest.param("qwen3_tied", MEASURED, marks=pytest.mark.long),
        pytest.param("qwen3_tied", COMPILED, marks=pytest.mark.long),
        ("qwen3_mixed", BESIDE_EXPERTS[2]),
        pytest.param("qwen3_mixed", BESIDE_EXPERTS[4], marks=pytest.mark.long),
    ],
    ids=["tied-1", "tied-2", "tied-4", "biases-1", "measured-2", "compiled-2", "moe-2", "moe-4"],
)
def test_logprobs_gradients_and_merged_weights_are_pefts(
    kind: str, layouts: dict[str, dict[str, Any]], make_model, run_ranks, tmp_path
):
    BEGUN.clear()
    has_experts = kind == "qwen3_mixed"
    targets = OF_ATTENTION if has_experts else [*OF_ATTENTION, "gate_proj", "up_proj", "down_proj"]
    lora = LORA | {"target_modules": targets}
    model, folder = make_model(kind, num_hidden_layers=8, intermediate_size=78)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # so that a base in bfloat16 loses nothing
    model.save_pretrained(folder)
    base, _ = reference(model)
    model.zero_grad()
    adapted = peft_model(model, tmp_path / "adapters", LORA["rank"], LORA["alpha"], targets)
    logprobs, gradients = reference(adapted)
    gradients = {k.replace(".default", ""): g for k, g in gradients.items() if "lora_" in k}
    save_file(gradients, tmp_path / "gradients.safetensors")
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    merged = {k: v.contiguous() for k, v in adapted.merge_and_unload().state_dict().items()}
    if kind.endswith("tied"):
        del merged["lm_head.weight"]
    if has_experts:  # which transformers keeps in one tensor
        merged = {k: v for k, v in merged.items() if ".mlp." not in k}
    save_file(merged, tmp_path / "merged.safetensors")
    degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    num_ranks = max(math.prod(of.get(d, 1) for d in degrees) for of in layouts.values())
    results = run_ranks(
        "lora_layouts", num_ranks, model=folder, **ARGUMENTS,
        lora=lora, adapters=str(tmp_path / "adapters" / "adapter_model.safetensors"),
        gradients=str(tmp_path / "gradients.safetensors"), folder=str(tmp_path),
        merged=str(tmp_path / "merged.safetensors"), layouts=layouts,
    )  # fmt: skip
    for name, layout in layouts.items():
        held = {key for result in results for key in result[name]["gradient_errors"]}
        assert len(held) == 8 * len(targets) * 2, "together they hold each adapter, and no more"
        assert any(result[name]["logprobs"] for result in results), name
        assert_begun_alike([result[name]["begun"] for result in results])
        is_v = layout.get("schedule") in ("ZBVZeroBubble", "VHalf")
        for result in (result[name] for result in results):
            for key, expected in (("base", base), ("logprobs", logprobs)):
                if result[key] is not None:
                    error = float((torch.tensor(result[key]) - expected).abs().max())
                    assert error < 1e-5, (name, key, error)
            wrong = {k: e for k, e in result["gradient_errors"].items() if not e < 2e-5}
            assert not wrong, (name, wrong)
            base_dtype = layout.get("base_dtype", "float32")
            assert result["dtypes"] == [[f"torch.{base_dtype}"], ["torch.float32"]], name
            assert result["norm"] == pytest.approx(norm, rel=1e-5), name
            assert result["merge_error"] < 1e-6, name
            assert bool(result["num_deferred"]) == is_v or layout.get("schedule") == "auto", name
        if "pp" in layout:
            found = [result[name]["in_gaps"] for result in results]
            assert_scored_in_gaps(found, base, has_gaps=layout["schedule"] == "1F1B")
        assert_written(tmp_path / name, tmp_path / "adapters")


def test_each_adapter_begins_with_random_numbers_of_its_own():
    layer = {
        "lora_A": torch.nn.Linear(6, 3, bias=False),
        "lora_B": torch.nn.Linear(3, 6, bias=False),
    }
    model = torch.nn.ModuleDict({name: torch.nn.ModuleDict(copy.deepcopy(layer)) for name in "ab"})
    begin_adapters([model], seed=1)
    first, second = (parameters["lora_A"].weight for parameters in model.values())
    assert not torch.equal(first, second) and not model["a"]["lora_B"].weight.any()


def assert_scored_in_gaps(
    found: list[dict[str, Any]], base: torch.Tensor, *, has_gaps: bool
) -> None:
    """The reference runs in gaps of a training pass, with adapters off there alone."""
    for of_rank in found:
        assert of_rank["num_rows"] > 0 or not has_gaps
        assert of_rank["gradient_error"] < 1e-5
        if of_rank["logprobs"] is not None:
            errors = torch.tensor(of_rank["logprobs"]) - torch.cat([base, base])
            assert float(errors.abs().max()) < 1e-5


def assert_begun_alike(norms: list[dict[str, float]]) -> None:
    """B begins with zeros, and A with values that depend on its name alone."""
    for of_rank in norms:
        for key, norm in of_rank.items():
            assert (norm == 0) == (".lora_B." in key), key
            assert BEGUN.setdefault(key, norm) == pytest.approx(norm, rel=1e-6), key


def assert_written(folder: Path, expected: Path) -> None:
    """PEFT loads the directory, which holds the adapters bit for bit."""
    found = load_file(folder / "adapter_model.safetensors")
    right = load_file(expected / "adapter_model.safetensors")
    assert found.keys() == right.keys()
    assert all(torch.equal(found[key], right[key]) for key in right)
    config = peft.PeftConfig.from_pretrained(str(folder))
    assert (config.r, config.lora_alpha) == (LORA["rank"], LORA["alpha"])
