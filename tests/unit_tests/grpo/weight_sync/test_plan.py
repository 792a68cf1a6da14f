"""Who puts what together, and how it is cut into buckets: pure."""

import torch

from torchtitan.grpo.models.shards import Assembly, Block, Piece
from torchtitan.grpo.weight_sync import gather
from torchtitan.grpo.weight_sync.plan import (
    plan_buckets,
    plan_sources,
)
from torchtitan.grpo.weight_sync.sources import SourceLimits


class FusedAdapter:
    """A state-dict adapter that splits ``fused`` weights, and renames the others."""

    def to_hf(self, state_dict):
        (item,) = state_dict.items()
        name, tensor = item
        if "fused" not in name:
            return {f"hf.{name}": tensor}
        return {f"hf.{name}.{i}": part for i, part in enumerate(tensor.chunk(2))}


def assembly(name: str, rows: int, *ranks: int) -> Assembly:
    part = rows // len(ranks)
    pieces = [Piece(rank, Block((i * part, 0), (part, 2))) for i, rank in enumerate(ranks)]
    return Assembly(name, (rows, 2), tuple(pieces))


def test_buckets_follow_the_model_and_hold_what_they_say():
    model = [assembly(n, r, 1) for n, r in (("a", 4), ("fused", 4), ("b", 100), ("c", 1))]
    plans = plan_buckets(model, FusedAdapter(), torch.bfloat16, bucket_bytes=32)  # pyright: ignore
    assert [[a.name for a in p.assemblies] for p in plans] == [["a", "fused"], ["b"], ["c"]]
    assert plans[0].spec.names == ("hf.a", "hf.fused.0", "hf.fused.1")
    assert plans[0].spec.shapes == ((4, 2), (2, 2), (2, 2))
    assert plans[0].spec.dtypes == ("bfloat16",) * 3
    assert [p.num_bytes for p in plans] == [32, 400, 4]


class MergingAdapter:
    """Renames every parameter, and sends adapters as a part of their targets."""

    def to_hf(self, state_dict):
        ((name, tensor),) = state_dict.items()
        return {} if ".lora_" in name else {f"hf.{name}": tensor}


def test_adapters_are_in_the_bucket_of_their_target_also_if_its_bias_begins_another_one():
    stem = "layers.0.attention.wq"
    names = ("weight", "bias", "lora_A.weight", "lora_B.weight")
    model = [assembly(f"{stem}.{name}", 4, 1) for name in names]
    model.append(assembly("layers.0.attention.wk.weight", 4, 1))
    plans = plan_buckets(model, MergingAdapter(), torch.bfloat16, bucket_bytes=16)  # pyright: ignore
    assert [[a.name for a in p.assemblies] for p in plans] == [
        [f"{stem}.weight", f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"],
        [f"{stem}.bias"],
        ["layers.0.attention.wk.weight"],
    ]


def test_each_pipeline_stage_has_a_source_of_its_own_and_everything_is_sent_once():
    # Stages on ranks (0, 1) and (2, 3), sharded over both; the last one is in a V with the first.
    model = [
        assembly("embed", 4, 0, 1),
        assembly("middle", 4, 3, 2),
        assembly("unsharded", 2, 2),
        assembly("output", 4, 1, 0),
    ]
    one = SourceLimits(max_sources=1)
    first, second = plan_sources(model, FusedAdapter(), torch.float32, 1000, one)  # pyright: ignore
    assert (first.rank, first.members) == (0, (0, 1))
    assert (second.rank, second.members) == (2, (2, 3))
    assert first.buckets[0].spec.names == ("hf.embed", "hf.output")
    assert second.buckets[0].spec.names == ("hf.middle", "hf.unsharded")
    assert first.num_bytes + second.num_bytes == sum(2 * 4 * a.shape[0] for a in model)


def test_a_push_plan_holds_the_selected_parameters_and_no_others(monkeypatch):
    names = ("layers.0.wq.lora_A.weight", "layers.0.wo.weight", "layers.1.wq.lora_B.weight")
    model = [assembly(name, 4, 0, 1) for name in names]
    monkeypatch.setattr(gather, "agree_on_assembly", lambda parameters, adapter: model)
    monkeypatch.setattr(gather, "agree_on_hosts", lambda: (0, 0))
    for adapters_only, wanted in ((False, model), (True, [model[0], model[2]])):
        plan = gather.agree_on_push(
            {},
            RenamingAdapter(),
            torch.bfloat16,
            1000,
            adapters_only=adapters_only,
            max_sources=1,  # pyright: ignore
        )
        names = [assembly.name for assembly in wanted]
        assert plan.names_from(0) == plan.names_from(1) == names
        (source,) = plan.sources
        assert [a.name for b in source.buckets for a in b.assemblies] == names
        assert plan.num_bytes == sum(2 * 4 * 2 for _ in wanted)


class RenamingAdapter:
    """Renames every parameter."""

    def to_hf(self, state_dict):
        ((name, tensor),) = state_dict.items()
        return {f"hf.{name}": tensor}
