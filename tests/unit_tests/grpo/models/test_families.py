"""Every family is its Hugging Face model, in one process and in every kind of layout and kernel.

Most sequences share contexts.
"""

from typing import Any

import pytest
import torch
from hf_reference import ARGUMENTS, reference
from safetensors.torch import save_file

FAMILIES = ["llama", "llama_tied", "mistral", "qwen2", "qwen2_tied", "qwen3_tied", "qwen3_mixed"]
# Each family meets each of these in one start of so many ranks.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "varlen": {"attention": "varlen", "ac": "full"}},
    2: {
        "fsdp2": {"dp_shard": 2},
        "tp2": {"tp": 2},
        "cp2": {"cp": 2},
        "pp2": {"pp": 2, "schedule": "1F1B"},
        "pp2 in a V": {"pp": 2, "schedule": "ZBVZeroBubble"},
        "replicate2": {"dp_replicate": 2},
        "varlen tp2": {"attention": "varlen", "tp": 2},
        "varlen cp2": {"attention": "varlen", "cp": 2},
        "varlen fsdp2": {"attention": "varlen", "dp_shard": 2, "ac": "selective op"},
    },
    4: {
        "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
        "fsdp2 pp2": {"dp_shard": 2, "pp": 2, "schedule": "Interleaved1F1B"},
        "tp2 pp2": {"tp": 2, "pp": 2, "schedule": "VHalf"},
        "fsdp2 tp2": {"dp_shard": 2, "tp": 2},
    },
}

EXPERT_LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"compiled": {"compiled": True}},
    2: {
        "fsdp2 ep2, full AC": {"dp_shard": 2, "ep": 2, "ac": "full"},
        "cp2 ep2": {"cp": 2, "ep": 2},
        "tp2 lent to ep2": {"tp": 2, "ep": 2},
    },
    4: {
        "hsdp2x2 ep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        "fsdp2 ep2 tp2": {"dp_shard": 2, "tp": 2, "ep": 2},
        "fsdp2 tp2 lent to ep4": {"dp_shard": 2, "tp": 2, "ep": 4},
    },
}


# Two families with all parts of a model stand for all where there are several ranks. On one rank, the
# second one is also compiled, which takes a minute.
SHORT = [("qwen2_tied", 2), ("qwen3_mixed", 2), ("qwen3_mixed", 4)]
SHORT += [(kind, 1) for kind in FAMILIES if kind != "qwen3_mixed"]


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        pytest.param(kind, n, marks=[] if (kind, n) in SHORT else pytest.mark.long)
        for kind in FAMILIES
        for n in LAYOUTS
    ],
)
def test_logprobs_gradients_and_norm_are_hugging_faces(
    kind: str, num_ranks: int, make_model, run_ranks, tmp_path
):
    # Four stages need two layers each, and tensor parallelism a width that divides.
    model, folder = make_model(kind, num_hidden_layers=8, intermediate_size=78)
    logprobs, gradients = reference(model)
    save_file(gradients, tmp_path / "gradients.safetensors")
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    layouts = LAYOUTS[num_ranks]
    if kind == "qwen3_mixed":
        layouts = layouts | EXPERT_LAYOUTS[num_ranks]
    results = run_ranks(
        "family_layouts", num_ranks, model=folder, **ARGUMENTS,
        gradients=str(tmp_path / "gradients.safetensors"), layouts=layouts,
    )  # fmt: skip
    for name in layouts:
        held = {key for result in results for key in result[name]["gradient_errors"]}
        assert len(held) >= 8 * 9 + 2, "the ranks together hold the whole model"
        scored = [result[name]["logprobs"] for result in results]
        assert any(scored), name
        largest, parameter = max(result[name]["largest held"] for result in results)
        for result in (result[name] for result in results):
            if result["logprobs"] is not None:
                found = torch.tensor(result["logprobs"])
                torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=1e-5, msg=name)
            wrong = {k: e for k, e in result["gradient_errors"].items() if not e < 2e-5}
            assert not wrong, name
            assert result["norm"] == pytest.approx(norm, rel=1e-5), name
            found, share = result["largest"]
            assert (found, share) == (parameter, pytest.approx((largest / norm) ** 2, rel=1e-4))
            found, share = result["largest of clipped"]
            assert (found, share) == (parameter, pytest.approx((largest / norm) ** 2, rel=1e-4))


def test_the_output_layer_multiplies_in_the_dtype_of_mixed_precision(make_model, run_ranks):
    _, folder = make_model("qwen3", intermediate_size=78)
    common = {"model": folder} | ARGUMENTS

    def scored(num_ranks: int, *layouts: dict[str, Any]) -> list[list[list[float]]]:
        mixed = [layout | {"precision": "bfloat16"} for layout in layouts]
        (results, *_) = run_ranks("sharded_model", num_ranks, layouts=mixed, **common)
        assert all(result["operands"] == ["torch.bfloat16"] for result in results)
        return [result["logprobs"] for result in results]

    (whole,) = scored(1, {})
    replicas, shards, tensor = scored(2, {"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2})
    assert replicas == shards == whole, "rounded in the same places"
    by_tensor = torch.tensor(tensor)
    torch.testing.assert_close(by_tensor, torch.tensor(whole), atol=0.02, rtol=0)
