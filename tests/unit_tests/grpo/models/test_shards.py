"""Who holds which block, and who sends it: pure functions."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan.grpo.models.collect import check_whole
from torchtitan.grpo.models.shards import (
    Assembly,
    Block,
    Held,
    Piece,
    block_of,
    in_buckets,
    plan_assembly,
)


def blocks(shape, placements, mesh_shape) -> dict[tuple[int, ...], Block]:
    return {
        coordinate: block_of(shape, placements, mesh_shape, coordinate)
        for coordinate in product(*map(range, mesh_shape))
    }


def test_shards_are_cut_as_torch_chunk_cuts():
    assert list(blocks((5, 2), [Shard(0)], (3,)).values()) == [
        Block((0, 0), (2, 2)), Block((2, 0), (2, 2)), Block((4, 0), (1, 2)),
    ]  # fmt: skip
    assert [b.shape[0] for b in blocks((2,), [Shard(0)], (4,)).values()] == [1, 1, 0, 0]


def test_partial_tensor_is_no_weight():
    with pytest.raises(ValueError, match="must be sharded or replicated"):
        block_of((4,), [Partial()], (2,), (0,))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_blocks_are_what_fsdp_after_tensor_parallelism_holds(rows, fsdp, tp, replicas):
    whole = torch.arange(rows)
    placements = [Replicate(), _StridedShard(0, split_factor=tp), Shard(0)]
    for (_, i, j), block in blocks((rows,), placements, (replicas, fsdp, tp)).items():
        # Shard(0) and FSDP both cut by torch.chunk, and leave ranks without a chunk empty.
        tp_parts = [*whole.chunk(tp), *[whole[:0]] * tp]
        parts = [*tp_parts[j].chunk(fsdp), *[whole[:0]] * fsdp]
        assert block.of(whole).tolist() == parts[i].tolist()


def held_by(ranks: dict[int, dict[str, tuple[int, int]]], num_ranks: int, rows: int = 4):
    """One-dimensional parameters of ``rows`` rows: for each rank names and (begin, end)."""
    return [
        {
            name: Held((rows,), Block((begin,), (end - begin,)))
            for name, (begin, end) in ranks.get(rank, {}).items()
        }
        for rank in range(num_ranks)
    ]


def test_one_of_the_ranks_that_hold_a_block_sends_it():
    halves = {0: {"norm.weight": (0, 2)}, 1: {"norm.weight": (2, 4)}}
    held = held_by(halves | {2: halves[0], 3: halves[1]}, 4)
    (assembly,) = plan_assembly(held)
    first, second = assembly.pieces
    assert first == Piece(0, Block((0,), (2,)), replicas=(2,))
    assert second == Piece(1, Block((2,), (2,)), replicas=(3,))
    assert first.sent_by(2) == Piece(2, Block((0,), (2,)), replicas=(0,))


def test_blocks_that_do_not_make_up_a_parameter_are_refused():
    for second in ((1, 4), (3, 4)):
        held = held_by({0: {"norm.weight": (0, 2)}, 1: {"norm.weight": second}}, 2)
        with pytest.raises(RuntimeError, match="must cover its shape"):
            plan_assembly(held)
    held = [{"norm.weight": Held((rows,), Block((0,), (rows,)))} for rows in (4, 5)]
    with pytest.raises(RuntimeError, match="on rank 1"):
        plan_assembly(held)
    held = held_by({0: {"norm.weight": (0, 4)}, 1: {"norm.weight": (4, 4)}}, 2)
    assert plan_assembly(held)[0].pieces == (Piece(0, Block((0,), (4,))),), "nothing is sent of it"


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_buckets_hold_everything_in_order_and_no_more_than_they_may(sizes, bucket_bytes):
    assemblies = [Assembly(str(i), (size,), ()) for i, size in enumerate(sizes)]
    buckets = in_buckets(assemblies, lambda a: math.prod(a.shape), bucket_bytes)
    assert [a for bucket in buckets for a in bucket] == assemblies
    for bucket in buckets:
        assert bucket
        # What has no bytes travels with what comes before it.
        holds_one = sum(a.numel > 0 for a in bucket) <= 1
        assert holds_one or sum(a.numel for a in bucket) <= bucket_bytes


WHOLE = [
    "tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.ffn_norm.weight",
    "layers.1.attention.wq.weight", "norm.weight", "output.weight",
]  # fmt: skip


def test_nothing_is_written_of_a_model_that_the_ranks_do_not_hold_as_a_whole():
    check_whole(WHOLE, SimpleNamespace(n_layers=2))
    check_whole(WHOLE[:-1], SimpleNamespace(n_layers=2, enable_weight_tying=True))
    for lost in (0, 3, 4, 5):
        names = [*WHOLE[:lost], *WHOLE[lost + 1 :]]
        module = WHOLE[lost].removesuffix(".weight").removesuffix(".attention.wq")
        with pytest.raises(RuntimeError, match=rf"missing are \['{module}'\].*module_fqns"):
            check_whole(names, SimpleNamespace(n_layers=2))
    with pytest.raises(RuntimeError, match=r"unknown \['layers\.1'\]"):
        check_whole(WHOLE, SimpleNamespace(n_layers=1))
