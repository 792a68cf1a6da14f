"""Weights come out of every layout as they went in, by the push and by the export."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

ZBV = "ZBVZeroBubble"
# One start of the ranks for all layouts of a size: starting takes longer than the rest.
CASES = {
    1: {"one": ("qwen3_tied", {})},
    2: {
        "fsdp2": ("qwen3_tied", {"dp_shard": 2, "ac": "full"}),
        "replicate2": ("llama", {"dp_replicate": 2, "compiled": True}),
        "tp2": ("qwen3_tied", {"tp": 2}),
        "cp2": ("qwen3", {"cp": 2, "ac": "full", "compiled": True}),
        "pp2": ("llama", {"pp": 2}),
        "pp2_zbv": ("qwen3", {"pp": 2, "schedule": ZBV}),
    },
    4: {
        "hsdp2x2": ("qwen3", {"dp_replicate": 2, "dp_shard": 2}),
        "fsdp2_tp2_tied": ("qwen3_tied", {"dp_shard": 2, "tp": 2}),
        "replicate2_tp2": ("qwen3", {"dp_replicate": 2, "tp": 2}),
        "pp2_tp2": ("llama", {"pp": 2, "tp": 2, "schedule": "Interleaved1F1B"}),
        "pp2_fsdp2_zbv": ("qwen3", {"pp": 2, "dp_shard": 2, "schedule": ZBV}),
        "fsdp2_tp2_ep2": ("qwen3_mixed", {"dp_shard": 2, "tp": 2, "ep": 2}),
        "pp2_fsdp2_ep2": ("qwen3_mixed", {"pp": 2, "dp_shard": 2, "ep": 2, "schedule": "1F1B"}),
    },
    8: {
        "fsdp2_tp2_pp2_zbv": ("qwen3", {"dp_shard": 2, "tp": 2, "pp": 2, "schedule": ZBV}),
        "fsdp2_cp2_tp2": ("llama", {"dp_shard": 2, "cp": 2, "tp": 2}),
    },
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_weights_come_out_as_they_went_in(num_ranks, make_model, run_ranks, tmp_path):
    folders = {
        kind: make_model(kind, intermediate_size=78)[1]
        for kind in {kind for kind, _ in CASES[num_ranks].values()}
    }
    results = run_ranks(
        "weights_in_out", num_ranks, folder=str(tmp_path),
        cases=[
            {"name": name, "model": folders[kind], "layout": layout}
            for name, (kind, layout) in CASES[num_ranks].items()
        ],
    )  # fmt: skip
    for name, (kind, layout) in CASES[num_ranks].items():
        for rank, result in enumerate(results):
            label = f"{name} on rank {rank}"
            assert result[name]["wrongly_loaded"] == [], label
            for reach, wrong in result[name]["wrongly_gathered"].items():
                assert wrong == [], f"{label}, reach {reach}"
            assert result[name]["wrongly_exported"] == [], label
            holds_all = layout.get("pp", 1) == 1
            assert ("tok_embeddings.weight" in result[name]["own_names"]) or not holds_all
            assert all("wrapped" not in n and "_orig" not in n for n in result[name]["own_names"])
        by_source = [r[name] for r in results if r[name]["gathered_names"]]
        # Every rank holds weights, and a run of eight ranks stays within `max_sources`.
        assert len(by_source) == num_ranks, name
        assert all(source["num_buckets"] > 1 for source in by_source), name
        is_sharded = {"dp_shard", "tp", "cp"} & layout.keys()
        for source in by_source:
            in_place = source["in_place"]
            assert (in_place["none"], bool(in_place["all"])) == ([], bool(is_sharded)), name
            assert set(in_place["some"]) == {r for r in in_place["all"] if r % 2 == 0}, name
        assert_in_model_order([source["gathered_names"] for source in by_source])
        assert_complete_directory(tmp_path / name, Path(folders[kind]))


def assert_in_model_order(names_of_sources: list[list[str]]) -> None:
    """Each source has its own names, in the model's order; together they have all."""
    for names in names_of_sources:
        layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
        assert layers == sorted(layers)
        assert "model.embed_tokens.weight" not in names[1:]
    names = [name for some in names_of_sources for name in some]
    assert len(set(names)) == len(names)
    norms = {f"model.layers.{layer}.input_layernorm.weight" for layer in range(3)}
    assert norms | {"model.embed_tokens.weight", "model.norm.weight"} <= set(names)


def assert_complete_directory(exported: Path, source: Path) -> None:
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert (exported / "config.json").exists()
    ordinary = exported.with_name("ordinary")
    ordinary.touch()
    assert {file.stat().st_mode for file in exported.iterdir()} == {ordinary.stat().st_mode}
    loaded: Any = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    original = AutoModelForCausalLM.from_pretrained(source)
    assert model.state_dict().keys() == original.state_dict().keys()
