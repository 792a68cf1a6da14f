# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How parameters are cut into buckets, where shards lie in a slot, and how much memory that takes."""

from typing import Any

import pytest
import torch

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_weights import keeps_bytes
from torchtitan.grpo.models.shards import Assembly, Block, Piece
from torchtitan.grpo.weight_sync import gather
from torchtitan.grpo.weight_sync.memory_plan import describe_placement
from torchtitan.grpo.weight_sync.plan import SourceLimits, plan_buckets, plan_sources
from torchtitan.grpo.weight_sync.slot_layout import lay_out_slot, pieces_of

DTYPE = torch.bfloat16
ONE = SourceLimits(max_sources=1)


class Adapter:
    """Renames most, turns ``turned`` around, and cuts others up."""

    def to_hf(self, native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ((name, tensor),) = native.items()
        if name == "turned":
            return {"hf.turned": tensor.T}
        if name in ("experts", "fused"):
            return {f"hf.{name}.{i}": part.squeeze(0) for i, part in enumerate(tensor.split(1))}
        if name == "reversed":
            return {f"hf.{i}": tensor[i] for i in reversed(range(len(tensor)))}
        if name == "half":
            return {"hf.half": tensor[: len(tensor) // 2]}
        return {f"hf.{name}": tensor}


class MergingAdapter:
    """Renames every parameter, and sends adapters as a part of their targets."""

    def to_hf(self, native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ((name, tensor),) = native.items()
        return {} if ".lora_" in name else {f"hf.{name}": tensor}


ADAPTER: Any = Adapter()
MERGING: Any = MergingAdapter()


def split(name: str, shape: tuple[int, ...], dim: int, *ranks: int) -> Assembly:
    """A parameter of which each rank holds an equal part."""
    part = (*shape[:dim], shape[dim] // len(ranks), *shape[dim + 1 :])
    begins = [
        tuple(i * p if d == dim else 0 for d, p in enumerate(part)) for i in range(len(ranks))
    ]
    pieces = (Piece(rank, Block(b, part)) for rank, b in zip(ranks, begins, strict=True))
    return Assembly(name, shape, tuple(pieces))


def assembly(name: str, rows: int, *ranks: int) -> Assembly:
    return split(name, (rows, 2), 0, *ranks)


def test_buckets_follow_the_model_and_hold_what_they_say():
    model = [assembly(n, r, 1) for n, r in (("a", 4), ("fused", 2), ("b", 100), ("c", 1))]
    plans = plan_buckets(model, ADAPTER, DTYPE, bucket_bytes=24)
    assert [[a.name for a in p.assemblies] for p in plans] == [["a", "fused"], ["b"], ["c"]]
    assert plans[0].spec.names == ("hf.a", "hf.fused.0", "hf.fused.1")
    assert plans[0].spec.shapes == ((4, 2), (2,), (2,))
    assert plans[0].spec.dtypes == ("bfloat16",) * 3
    assert [p.num_bytes for p in plans] == [24, 400, 4]


def test_adapters_are_in_the_bucket_of_their_target_also_if_its_bias_begins_another_one():
    stem, other = "layers.0.attention.wq", "layers.0.attention.wk.weight"
    names = ("weight", "bias", "lora_A.weight", "lora_B.weight")
    model = [assembly(name, 4, 1) for name in (*(f"{stem}.{name}" for name in names), other)]
    plans = plan_buckets(model, MERGING, DTYPE, bucket_bytes=16)
    assert [[a.name for a in p.assemblies] for p in plans] == [
        [f"{stem}.weight", f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"],
        [f"{stem}.bias"],
        [other],
    ]


def test_each_pipeline_stage_has_a_source_of_its_own_and_everything_is_sent_once():
    # Stages on ranks (0, 1) and (2, 3), sharded over both; the last one is in a V with the first.
    ranks = {"embed": (0, 1), "middle": (3, 2), "unsharded": (2,), "output": (1, 0)}
    model = [assembly(name, 4, *holders) for name, holders in ranks.items()]
    first, second = plan_sources(model, ADAPTER, torch.float32, 1000, ONE)
    assert (first.rank, first.members) == (0, (0, 1))
    assert (second.rank, second.members) == (2, (2, 3))
    assert first.buckets[0].spec.names == ("hf.embed", "hf.output")
    assert second.buckets[0].spec.names == ("hf.middle", "hf.unsharded")
    assert first.num_bytes + second.num_bytes == sum(2 * 4 * a.shape[0] for a in model)


@pytest.mark.parametrize("adapters_only", [False, True])
def test_a_push_plan_holds_the_selected_parameters_and_no_others(adapters_only, monkeypatch):
    names = ["layers.0.wq.lora_A.weight", "layers.0.wo.weight", "layers.1.wq.lora_B.weight"]
    model = [assembly(name, 4, 0, 1) for name in names]
    monkeypatch.setattr(gather, "agree_on_assembly", lambda parameters, adapter: model)
    monkeypatch.setattr(gather, "agree_on_hosts", lambda: (0, 0))
    plan = gather.agree_on_push(
        {}, ADAPTER, DTYPE, 1000, adapters_only=adapters_only, max_sources=1
    )
    wanted = names[::2] if adapters_only else names
    (source,) = plan.sources
    assert [a.name for b in source.buckets for a in b.assemblies] == wanted
    assert plan.num_bytes == 2 * 4 * 2 * len(wanted)


@pytest.mark.parametrize(
    ("name", "keeps"),
    [("norm", True), ("experts", True), ("turned", False), ("reversed", False), ("half", False)],
)
def test_bytes_are_kept_where_a_parameter_is_renamed_or_cut_up_in_order(name, keeps):
    assert keeps_bytes(ADAPTER, name, (4, 6, 3)[: 2 if name == "turned" else 3]) is keeps


ASSEMBLIES = [
    split("columns", (3, 4), 1, 0, 1),
    split("rows", (6, 5), 0, 0, 1),
    split("experts", (2, 3, 3), 0, 0, 1),
    split("turned", (4, 3), 0, 0, 1),
    split("norm", (7,), 0, 0),
]


@pytest.fixture(params=[False, True], ids=["strided", "contiguous"])
def laid_out(request):
    (source,) = plan_sources(ASSEMBLIES, ADAPTER, DTYPE, bucket_bytes=100, limits=ONE)
    layout = lay_out_slot(source, ADAPTER, DTYPE, contiguous=request.param)
    return source, layout, torch.zeros(layout.num_bytes, dtype=torch.uint8), request.param


def test_shards_that_are_written_are_whole_parameters_in_their_buckets(laid_out):
    source, layout, slot, wants_contiguous = laid_out
    assert len(source.buckets) > 1
    wholes = {a.name: torch.randn(a.shape).to(DTYPE) for a in ASSEMBLIES}
    is_contiguous = True
    for rank in range(2):
        for name, shard in layout.shards_in(slot, rank).items():
            piece = next(p for a, p in pieces_of(ASSEMBLIES, rank) if a.name == name)
            shard.copy_(piece.block.of(wholes[name]))
            is_contiguous &= shard.is_contiguous()
    # Copy engines get contiguous memory, and write in place what is contiguous.
    assert is_contiguous is wants_contiguous
    converted = {name for name, _ in layout.blocks}
    assert converted == ({"columns", "turned"} if wants_contiguous else {"turned"})
    for plan, bucket in zip(source.buckets, layout.buckets_in(slot), strict=True):
        assert bucket.numel() == plan.num_bytes
        parts = bucket.view(DTYPE).split([torch.Size(s).numel() for s in plan.spec.shapes])
        sent = [t for a in plan.assemblies for t in ADAPTER.to_hf({a.name: wholes[a.name]}).items()]
        for part, (name, tensor) in zip(parts, sent, strict=True):
            if name.removeprefix("hf.") not in converted:
                assert torch.equal(part, tensor.reshape(-1)), name


def test_no_byte_of_a_slot_is_two_shards(laid_out):
    _, layout, slot, _ = laid_out
    num_bytes = 0
    for rank in range(2):
        for shard in layout.shards_in(slot, rank).values():
            assert not shard.view(torch.int16).any(), "another shard lies here, too"
            shard.view(torch.int16).fill_(-1)
            num_bytes += shard.numel() * DTYPE.itemsize
    assert (slot == 255).sum() == num_bytes
    # Or a conversion would overwrite what it converts.
    assert min(layout.blocks.values()) >= layout.buckets[-1][1]


# Large enough, so that other memory of a process does not matter.
SIZES = {"hidden_size": 288, "intermediate_size": 768, "vocab_size": 8000}


@pytest.mark.parametrize(
    ("kind", "layout", "on_gpu"),
    [
        ("qwen3", {}, False),
        ("llama", {"dp_shard": 2}, False),
        ("qwen3", {"pp": 2}, False),
        ("llama", {"tp": 2}, True),
        ("qwen3", {"dp_shard": 2, "tp": 2}, True),
    ],
)
def test_the_memory_that_was_predicted_is_counted(kind, layout, on_gpu, make_model, run_ranks):
    _, folder = make_model(kind, **SIZES)
    num_ranks = 1
    for degree in layout.values():
        num_ranks *= degree
    results = run_ranks("push_memory", num_ranks, model=folder, layout=layout, on_gpu=on_gpu)
    predicted = results[0]["predicted"]
    assert sum(result["counted"] for result in results) == pytest.approx(predicted, rel=0.05)
    assert results[0]["planned"] == pytest.approx(predicted, rel=0.05)
    ours, planned = results[0]["buckets"]
    assert ours == pytest.approx(planned, rel=0.05)


def test_it_is_said_for_which_placement_of_stages_the_figures_are():
    config = JobConfig()
    parallelism = config.parallelism
    parallelism.pipeline_parallel_degree = 2
    parallelism.pipeline_parallel_schedule = "auto"
    (line,) = describe_placement(config, 4)
    assert line.startswith("(for 2 stages a rank in a V: the schedule is not chosen yet")
    # One stage a rank, or three of them, can only be placed in one way.
    for schedule, layers, degree in (
        ("auto", 3, 2),
        ("auto", 1, 2),
        ("VZB", None, 2),
        ("auto", None, 1),
    ):
        parallelism.pipeline_parallel_schedule = schedule
        parallelism.pipeline_parallel_layers_per_stage = layers
        parallelism.pipeline_parallel_degree = degree
        assert list(describe_placement(config, 4)) == []
