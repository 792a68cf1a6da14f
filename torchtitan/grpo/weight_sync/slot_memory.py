# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Snapshot slots in the memory of their source, which the other ranks of its host write.

Where ranks train on the processors of one host, each copies its shards right into the
buckets that its source sends from. A shard that went through a socket, or was copied again,
would cost the cores that the transfer needs. The memory is an anonymous file (``memfd``):
it has no name that a killed run could leave behind, and is gone with the last process that
has it mapped.

All slots take their memory at once. A slot's first copy would otherwise be many times as
long as every other, page by page, and would come amid the run, when a slow server makes
one more slot needed: that copy has then not ended when the next optimizer step begins.

    consumes        the layout of each source's slots
    produces        for each rank and slot, where its shards go; for a source, its buckets
    waits for       all ranks, once, as the run begins
    unblocked by    the run's own process group
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from torchtitan.grpo.weight_sync.slot_layout import PushPlan, Shards, SlotLayout, pieces_of

CAN_SHARE = hasattr(os, "memfd_create")
"""Linux has memory files; elsewhere ranks send their shards."""

_SECRET_BYTES = 16


@dataclass(frozen=True)
class SlotOffer:
    """What another rank needs to write into this one's slots.

    Attributes:
        path: Under which the owner's file can be opened on its host, while the owner lives.
        secret: What stands at the file's end. Elsewhere the path may name another file.
        slot_bytes: Size of a slot.
        num_slots: How many follow one another.
    """

    path: str
    secret: bytes
    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.slot_bytes * self.num_slots + _SECRET_BYTES

    def slots_in(self, memory: mmap.mmap) -> list[torch.Tensor]:
        """The [slot_bytes] uint8 tensor of each slot; they keep the memory mapped."""
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return list(flat[:-_SECRET_BYTES].split(self.slot_bytes))


class SharedSlots:
    """A source's slots; zeros at first.

    Args:
        slot_bytes: Size of a slot.
        num_slots: How many slots.

    Attributes:
        slots: The [slot_bytes] uint8 tensor of each.
        offer: For other ranks.
    """

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self._file = os.memfd_create("grpo-snapshot-slots")
        self.offer = SlotOffer(
            path=f"/proc/{os.getpid()}/fd/{self._file}",
            secret=secrets.token_bytes(_SECRET_BYTES),
            slot_bytes=slot_bytes,
            num_slots=num_slots,
        )
        os.ftruncate(self._file, self.offer.num_bytes)
        memory = _mapped(self._file, self.offer.num_bytes)
        memory[-_SECRET_BYTES:] = self.offer.secret
        self.slots = self.offer.slots_in(memory)

    def close(self) -> None:
        """Nobody else can map the slots any more; whoever has them mapped keeps them."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def attach(offer: SlotOffer) -> list[torch.Tensor] | None:
    """The slots of another rank, in its memory; None where they cannot be reached from here.

    That is so on another host, in another container, or for another user.
    """
    try:
        file = os.open(offer.path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != offer.num_bytes:
            return None
        memory = _mapped(file, offer.num_bytes)
    except (OSError, ValueError):  # not a file that can be mapped
        return None
    finally:
        os.close(file)
    if memory[-_SECRET_BYTES:] != offer.secret:
        return None
    return offer.slots_in(memory)


def _mapped(file: int, num_bytes: int) -> mmap.mmap:
    """All of a memory file, with every page in place."""
    return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def own_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that no other rank writes; written once, so that every page is in place."""
    return torch.empty(shape, dtype=dtype).zero_()


@dataclass
class RankSlots:
    """One rank's view of all slots.

    Attributes:
        shards: For each slot, where this rank copies what it sends.
        buckets: On a source whose ranks write into its buckets: these, for each slot.
        others: On a source, for each slot and each rank that writes there: its shards.
        in_place: By source, the ranks that write into its slots.
    """

    shards: list[dict[str, torch.Tensor]]
    buckets: list[list[torch.Tensor]] | None = None
    others: list[dict[int, Shards]] = field(default_factory=list)
    in_place: dict[int, set[int]] = field(default_factory=dict)


def make_slots(plan: PushPlan, num_slots: int) -> RankSlots:
    """Slots in the memory of processors; collective over all ranks.

    Args:
        plan: Who sends what.
        num_slots: How many slots.
    """
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
    memory |= _attached(
        shared, [s.rank for s in plan.sources if rank in s.members and s is not own]
    )
    in_place = _who_reaches(set(memory) - {rank})
    if shared is not None:
        shared.close()
    slots = RankSlots(shards=[{} for _ in range(num_slots)], in_place=in_place)
    for source in plan.sources:
        if rank in source.members:
            _add_shards(slots, plan.layouts[source.rank], memory.get(source.rank), rank)
    if own is not None:
        layout = plan.layouts[rank]
        slots.buckets = [layout.buckets_in(slot) for slot in memory[rank]]
        slots.others = [
            {other: layout.shards_in(slot, other) for other in in_place.get(rank, ())}
            for slot in memory[rank]
        ]
    return slots


def _attached(shared: SharedSlots | None, wanted: list[int]) -> dict[int, list[torch.Tensor]]:
    """The slots of other ranks, as far as they can be reached; collective over all ranks."""
    offers: list[SlotOffer | None] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, shared.offer if shared is not None else None)
    reached = {}
    for rank in wanted:
        offer = offers[rank]
        slots = attach(offer) if offer is not None else None
        if slots is not None:
            reached[rank] = slots
    return reached


def _who_reaches(reached: set[int]) -> dict[int, set[int]]:
    """By source, the other ranks that have mapped its slots; collective over all ranks."""
    reached_by: list[set[int]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(reached_by, reached)
    return {
        source: {rank for rank, those in enumerate(reached_by) if source in those}
        for source in set().union(*reached_by)
    }


def _add_shards(
    slots: RankSlots, layout: SlotLayout, memory: list[torch.Tensor] | None, rank: int
) -> None:
    """Where this rank's shards for one source go: into its memory, or into our own."""
    for index, shards in enumerate(slots.shards):
        if memory is not None:
            shards.update(layout.shards_in(memory[index], rank))
        else:
            shards.update(
                (assembly.name, own_memory(piece.block.shape, layout.dtype))
                for assembly, piece in pieces_of(layout.assemblies, rank)
            )
