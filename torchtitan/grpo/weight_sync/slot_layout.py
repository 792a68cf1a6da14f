# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes where each shard lies in a snapshot slot of one source, and allocates the slots.

    | bucket 0 | bucket 1 | ... | blocks that are not copied directly into a bucket |

Layouts are computed by pure functions, which give the same result on all ranks. Ranks copy most
shards directly into the buckets that are sent, so that these need no gathering. Two kinds of
shards are first copied into separate blocks: those of parameters whose bytes differ in the Hugging
Face layout and, if a GPU makes the copies, those that are not contiguous in the parameter. Torch
would copy the latter in a way that makes the training thread wait.

Slots lie in the host memory of their source, and the other ranks on its host write into them. GPUs
write with copy engines, for which each process pins the memory. Sending a shard through a socket,
or copying it again, would take cores from training.

All slots are allocated at the start. If a slot were allocated during the run, because a server is
slow, the copy into that slot would not end before the next optimizer step.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.hf_weights import keeps_bytes
from torchtitan.grpo.models.shards import Assembly, Piece
from torchtitan.grpo.system.host_memory import (
    CAN_SHARE,
    SharedSlots,
    SlotOffer,
    attach,
    own_memory,
    pin,
)
from torchtitan.grpo.weight_sync.plan import SourceLimits, SourcePlan, plan_sources
from torchtitan.grpo.weight_wire.adapter_names import is_adapter

Shards = Mapping[str, torch.Tensor]
"""A rank's part of each parameter to which the rank contributes, by native name."""

_ALIGNMENT = 64  # bytes at which buckets and blocks are aligned: a cache line


@dataclass(frozen=True)
class Place:
    """Where a whole parameter lies: from byte ``begin`` of bucket number ``bucket``."""

    shape: tuple[int, ...]
    bucket: int
    begin: int


@dataclass(frozen=True)
class SlotLayout:
    """The offsets of shards and buckets in a slot; see the module's docstring.

    ``buckets`` holds the start and end of each bucket, in bytes. ``places`` holds, by native name,
    the places of the parameters that are sent without conversion. ``blocks`` holds the
    first byte of each shard that is not copied directly into a bucket, by native name and rank.
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
        """Returns the parameters that need no conversion, as views of the given buckets."""
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
    """What each source sends. ``model_bytes`` counts the whole model, even if only adapters are sent."""

    sources: list[SourcePlan]
    layouts: dict[int, SlotLayout]
    wire_dtype: torch.dtype
    model_bytes: int = 0

    def source(self, rank: int) -> SourcePlan | None:
        return next((source for source in self.sources if source.rank == rank), None)

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)


def plan_push(
    assemblies: Sequence[Assembly],
    adapter: StateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
    limits: SourceLimits,
    *,
    adapters_only: bool = False,
    contiguous: bool = False,
) -> PushPlan:
    """Plans what each source sends; see :func:`lay_out_slot` for ``contiguous``."""
    pushed = [a for a in assemblies if is_adapter(a.name) or not adapters_only]
    sources = plan_sources(pushed, adapter, wire_dtype, bucket_bytes, limits)
    layouts = {s.rank: lay_out_slot(s, adapter, wire_dtype, contiguous=contiguous) for s in sources}
    model_numel = sum(a.numel for a in assemblies if not is_adapter(a.name))
    return PushPlan(sources, layouts, wire_dtype, model_numel * wire_dtype.itemsize)


def lay_out_slot(
    source: SourcePlan,
    adapter: StateDictAdapter,
    wire_dtype: torch.dtype,
    *,
    contiguous: bool = False,
) -> SlotLayout:
    """Lays out a source's slot; if ``contiguous``, shards are copied to contiguous memory, as GPUs need."""
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


class SnapshotSlots:
    """Allocates the slots of this rank and maps the slots of other ranks on the same host.

    All ranks must construct it at the same time. A rank that cannot map its source's memory copies
    its shards into memory of its own and sends them. Slots that a GPU writes must be ``pinned``.
    ``shards`` holds for each slot the tensors into which this rank copies, by native name.
    """

    shards: Sequence[Mapping[str, torch.Tensor]]

    def __init__(self, plan: PushPlan, num_slots: int, *, pinned: bool = False) -> None:
        rank = dist.get_rank()
        own = plan.source(rank)
        shared: SharedSlots | None = None
        memory: dict[int, list[torch.Tensor]] = {}
        if own is not None:
            slot_bytes = plan.layouts[rank].num_bytes
            if CAN_SHARE and len(own.members) > 1:
                shared = SharedSlots(slot_bytes, num_slots)
                memory[rank] = shared.slots
            else:
                memory[rank] = [own_memory([slot_bytes], torch.uint8) for _ in range(num_slots)]
        others = [s.rank for s in plan.sources if rank in s.members and s is not own]
        memory |= _attached(shared, others)
        self._writers = _who_reaches(set(memory) - {rank})
        if shared is not None:
            shared.close()
        own_shards = [_own_shards(plan, memory, rank) for _ in range(num_slots)]
        self.shards = [
            own_shards[slot] | _shards_in(plan, memory, slot, rank) for slot in range(num_slots)
        ]
        if pinned:
            for slots in memory.values():
                pin(slots)
            for tensors in own_shards:
                pin(list(tensors.values()))
        self._buckets: list[list[torch.Tensor]] | None = None
        if own is not None:
            layout, writers = plan.layouts[rank], self.writers(rank)
            self._buckets = [layout.buckets_in(slot) for slot in memory[rank]]
            self._shards_of_writers = [
                {writer: layout.shards_in(slot, writer) for writer in writers}
                for slot in memory[rank]
            ]

    def buckets(self, slot: int) -> list[torch.Tensor] | None:
        """Returns the buckets of a slot; ``None`` if this rank is not a source."""
        return None if self._buckets is None else self._buckets[slot]

    def writers(self, source: int) -> Collection[int]:
        """Returns the ranks other than ``source`` that copy directly into its slots."""
        return self._writers.get(source, ())

    def shards_of_writers(self, slot: int) -> Mapping[int, Shards]:
        """Returns, by rank, the shards that other ranks copied into this source's slot."""
        return self._shards_of_writers[slot]


def _attached(shared: SharedSlots | None, wanted: list[int]) -> dict[int, list[torch.Tensor]]:
    """Maps the slots of those ``wanted`` ranks whose memory can be shared; collective."""
    offers: list[SlotOffer | None] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, shared.offer if shared is not None else None)
    mapped = {rank: attach(offer) for rank in wanted if (offer := offers[rank]) is not None}
    return {rank: slots for rank, slots in mapped.items() if slots is not None}


def _who_reaches(reached: set[int]) -> dict[int, set[int]]:
    """Returns, for each source, which other ranks have mapped its slots; collective."""
    reached_by: list[set[int]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(reached_by, reached)
    return {
        source: {rank for rank, those in enumerate(reached_by) if source in those}
        for source in set().union(*reached_by)
    }


def _shards_in(
    plan: PushPlan, memory: Mapping[int, list[torch.Tensor]], slot: int, rank: int
) -> dict[str, torch.Tensor]:
    shards: dict[str, torch.Tensor] = {}
    for source in plan.sources:
        if rank in source.members and source.rank in memory:
            shards |= plan.layouts[source.rank].shards_in(memory[source.rank][slot], rank)
    return shards


def _own_shards(
    plan: PushPlan, memory: Mapping[int, list[torch.Tensor]], rank: int
) -> dict[str, torch.Tensor]:
    """Allocates one slot for the shards that this rank copies for sources whose memory it has not mapped."""
    return {
        assembly.name: own_memory(piece.block.shape, layout.dtype)
        for source, layout in plan.layouts.items()
        if source not in memory
        for assembly, piece in pieces_of(layout.assemblies, rank)
    }
