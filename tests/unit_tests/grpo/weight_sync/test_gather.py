"""How the model is cut into buckets: pure."""

import torch

from torchtitan.grpo.models.shards import Assembly, Block, Piece
from torchtitan.grpo.weight_sync.gather import plan_buckets


class FusedAdapter:
    """A state-dict adapter that splits ``fused`` weights, and renames the others."""

    def to_hf(self, state_dict):
        (item,) = state_dict.items()
        name, tensor = item
        if "fused" not in name:
            return {f"hf.{name}": tensor}
        return {f"hf.{name}.{i}": part for i, part in enumerate(tensor.chunk(2))}


def assembly(name: str, rows: int) -> Assembly:
    return Assembly(name, (rows, 2), (Piece(1, Block((0, 0), (rows, 2))),))


def test_buckets_follow_the_model_and_hold_what_they_say():
    model = [assembly("a", 4), assembly("fused", 4), assembly("b", 100), assembly("c", 1)]
    plans = plan_buckets(model, FusedAdapter(), torch.bfloat16, bucket_bytes=32)  # pyright: ignore
    assert [[a.name for a in p.assemblies] for p in plans] == [["a", "fused"], ["b"], ["c"]]
    assert plans[0].spec.names == ("hf.a", "hf.fused.0", "hf.fused.1")
    assert plans[0].spec.shapes == ((4, 2), (2, 2), (2, 2))
    assert plans[0].spec.dtypes == ("bfloat16",) * 3
    assert [p.num_bytes for p in plans] == [32, 400, 4]
