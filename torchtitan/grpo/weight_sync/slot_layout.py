# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes where each shard lies in a snapshot slot of one source.

    | bucket 0 | bucket 1 | ... | blocks that are not copied directly into a bucket |

The functions are pure and give the same result on all ranks.

Ranks copy most shards directly into the buckets that are sent, so that these need no gathering.
Two kinds of shards are first copied into separate blocks and are assembled from there in the
buckets: shards of parameters whose bytes differ in the Hugging Face layout and, if a GPU makes
the copies, shards whose elements are not contiguous in the parameter. A GPU's copy engine
writes contiguous memory. To any other memory, torch would copy in a way that makes the training
thread wait.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from torchtitan.grpo.models.hf_weights import keeps_bytes
from torchtitan.grpo.models.shards import Assembly, Piece
from torchtitan.grpo.upstream.state_dict import BaseStateDictAdapter
from torchtitan.grpo.weight_sync.plan import SourcePlan

Shards = Mapping[str, torch.Tensor]
"""A rank's part of each parameter to which the rank contributes, by native name."""

_ALIGNMENT = 64  # bytes at which buckets and blocks are aligned: a cache line


@dataclass(frozen=True)
class Place:
    """Place of a whole parameter: from byte ``begin`` of a bucket."""

    shape: tuple[int, ...]
    bucket: int
    begin: int


@dataclass(frozen=True)
class SlotLayout:
    """The offsets of shards and buckets in a slot; see the module's docstring.

    ``buckets`` holds the first byte of each bucket, and the byte after its last. ``places`` are
    those of the parameters that are not converted, by native name. ``blocks`` holds the first
    byte of each block that is not copied directly into a bucket, by native name and rank.
    """

    dtype: torch.dtype
    assemblies: tuple[Assembly, ...]
    buckets: tuple[tuple[int, int], ...]
    places: Mapping[str, Place]
    blocks: Mapping[tuple[str, int], int]
    num_bytes: int

    def buckets_in(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Returns the buckets of a slot, [num_bytes] uint8, as views."""
        return [slot[begin:end] for begin, end in self.buckets]

    def wholes_in(self, buckets: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the parameters that are not converted, as views of the given buckets."""
        return {
            name: _view(buckets[place.bucket], place.begin, place.shape, self.dtype)
            for name, place in self.places.items()
        }

    def shards_in(self, slot: torch.Tensor, rank: int) -> Shards:
        """Returns the tensors into which a rank copies its shards, as views of a slot."""
        wholes = self.wholes_in(self.buckets_in(slot))
        return {
            assembly.name: _view(slot, begin, piece.block.shape, self.dtype)
            if (begin := self.blocks.get((assembly.name, rank))) is not None
            else piece.block.of(wholes[assembly.name])
            for assembly, piece in pieces_of(self.assemblies, rank)
        }


@dataclass(frozen=True)
class PushPlan:
    """The parameters that each source sends, and where they lie; the same on every rank.

    ``model_bytes`` counts one version of the whole model, even if only a part of it is pushed.
    """

    sources: list[SourcePlan]
    layouts: dict[int, SlotLayout]
    wire_dtype: torch.dtype
    model_bytes: int = 0

    def source(self, rank: int) -> SourcePlan | None:
        return next((source for source in self.sources if source.rank == rank), None)

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    def names_from(self, rank: int) -> list[str]:
        """Returns the parameters to which a rank contributes a part."""
        return [
            assembly.name
            for layout in self.layouts.values()
            for assembly, _ in pieces_of(layout.assemblies, rank)
        ]


def lay_out_slot(
    source: SourcePlan,
    adapter: BaseStateDictAdapter,
    wire_dtype: torch.dtype,
    *,
    contiguous: bool = False,
) -> SlotLayout:
    """Returns the layout of a source's slots.

    With ``contiguous``, every shard is copied to contiguous memory, as GPUs require.
    """
    end = 0
    buckets, places, blocks = [], {}, {}
    for index, plan in enumerate(source.buckets):
        position = 0
        for assembly in plan.assemblies:
            if keeps_bytes(adapter, assembly.name, assembly.shape):
                places[assembly.name] = Place(assembly.shape, index, position)
            position += plan.num_bytes_of[assembly.name]
        buckets.append((end, end + position))
        end = _aligned(end + position)
    assemblies = tuple(a for plan in source.buckets for a in plan.assemblies)
    for assembly in assemblies:
        whole = torch.empty(assembly.shape, device="meta")
        for piece in assembly.pieces:
            is_in_place = assembly.name in places and (
                not contiguous or piece.block.of(whole).is_contiguous()
            )
            if not is_in_place:
                blocks[assembly.name, piece.rank] = end
                end = _aligned(end + piece.block.numel * wire_dtype.itemsize)
    return SlotLayout(wire_dtype, assemblies, tuple(buckets), places, blocks, end)


def pieces_of(assemblies: Sequence[Assembly], rank: int) -> Iterator[tuple[Assembly, Piece]]:
    """Yields the pieces that a rank contributes, each with its parameter's assembly."""
    for assembly in assemblies:
        for piece in assembly.pieces:
            if piece.rank == rank:
                yield assembly, piece


def _view(
    memory: torch.Tensor, begin: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return memory[begin : begin + size].view(dtype).view(tuple(shape))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
