# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Shards lie where they travel from, each byte once; what is converted lies apart."""

from typing import Any

import pytest
import torch

from torchtitan.grpo.models.hf_weights import keeps_bytes
from torchtitan.grpo.models.shards import Assembly, Block, Piece
from torchtitan.grpo.weight_sync.plan import plan_sources
from torchtitan.grpo.weight_sync.slot_layout import lay_out_slot, pieces_of
from torchtitan.grpo.weight_sync.sources import SourceLimits

DTYPE = torch.bfloat16


class Adapter:
    """Renames most, turns ``turned`` around, and cuts ``experts`` up."""

    def to_hf(self, native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ((name, tensor),) = native.items()
        if name == "turned":
            return {"hf.turned": tensor.T}
        if name == "experts":
            return {f"hf.experts.{i}": part.squeeze(0) for i, part in enumerate(tensor.split(1))}
        if name == "reversed":
            return {f"hf.{i}": tensor[i] for i in reversed(range(len(tensor)))}
        if name == "half":
            return {"hf.half": tensor[: len(tensor) // 2]}
        return {f"hf.{name}": tensor}


ADAPTER: Any = Adapter()


@pytest.mark.parametrize(
    ("name", "keeps"),
    [("norm", True), ("experts", True), ("turned", False), ("reversed", False), ("half", False)],
)
def test_bytes_are_kept_where_a_parameter_is_renamed_or_cut_up_in_order(name, keeps):
    assert keeps_bytes(ADAPTER, name, (4, 6, 3)[: 2 if name == "turned" else 3]) is keeps


def split(name: str, shape: tuple[int, ...], dim: int | None) -> Assembly:
    """A parameter that ranks 0 and 1 hold halves of, or rank 0 alone."""
    if dim is None:
        whole = Piece(0, Block((0,) * len(shape), shape))
        return Assembly(name, shape, (whole,))
    half = (*shape[:dim], shape[dim] // 2, *shape[dim + 1 :])
    begin = tuple(half[d] if d == dim else 0 for d in range(len(shape)))
    return Assembly(
        name, shape, (Piece(0, Block((0,) * len(shape), half)), Piece(1, Block(begin, half)))
    )


ASSEMBLIES = [
    split("columns", (3, 4), 1),
    split("rows", (6, 5), 0),
    split("experts", (2, 3, 3), 0),
    split("turned", (4, 3), 0),
    split("norm", (7,), None),
]


ONE = SourceLimits(max_sources=1)


@pytest.fixture(params=[False, True], ids=["strided", "contiguous"])
def laid_out(request):
    (source,) = plan_sources(ASSEMBLIES, ADAPTER, DTYPE, bucket_bytes=100, limits=ONE)
    return source, lay_out_slot(source, ADAPTER, DTYPE, contiguous=request.param)


def test_copy_engines_get_contiguous_memory_and_write_in_place_what_is_contiguous():
    (source,) = plan_sources(ASSEMBLIES, ADAPTER, DTYPE, bucket_bytes=100, limits=ONE)
    layout = lay_out_slot(source, ADAPTER, DTYPE, contiguous=True)
    slot = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for rank in range(2):
        shards = layout.shards_in(slot, rank)
        assert all(shard.is_contiguous() for shard in shards.values())
    assert {name for name, _ in layout.blocks} == {"columns", "turned"}


def test_shards_that_are_written_are_whole_parameters_in_their_buckets(laid_out):
    source, layout = laid_out
    assert len(source.buckets) > 1
    slot = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    wholes = {a.name: torch.randn(a.shape).to(DTYPE) for a in ASSEMBLIES}
    for rank in range(2):
        for name, shard in layout.shards_in(slot, rank).items():
            piece = next(p for a, p in pieces_of(ASSEMBLIES, rank) if a.name == name)
            shard.copy_(piece.block.of(wholes[name]))
    for plan, bucket in zip(source.buckets, layout.buckets_in(slot), strict=True):
        assert bucket.numel() == plan.num_bytes
        parts = bucket.view(DTYPE).split([torch.Size(s).numel() for s in plan.spec.shapes])
        sent = [t for a in plan.assemblies for t in ADAPTER.to_hf({a.name: wholes[a.name]}).items()]
        for part, (name, tensor) in zip(parts, sent, strict=True):
            if name.removeprefix("hf.") not in {name for name, _ in layout.blocks}:
                assert torch.equal(part, tensor.reshape(-1)), name


def test_no_byte_of_a_slot_is_two_shards(laid_out):
    _, layout = laid_out
    slot = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    num_bytes = 0
    for rank in range(2):
        for shard in layout.shards_in(slot, rank).values():
            assert not shard.view(torch.int16).any(), "another shard lies here, too"
            shard.view(torch.int16).fill_(-1)
            num_bytes += shard.numel() * DTYPE.itemsize
    assert (slot == 255).sum() == num_bytes
    # Or a conversion would overwrite what it converts.
    assert min(layout.blocks.values()) >= layout.buckets[-1][1]
