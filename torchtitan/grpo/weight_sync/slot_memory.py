# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Snapshot slots in the memory of their source, into which the ranks of its host write.

If ranks train on the CPUs of one host, each copies its shards right into the buckets that
its source sends from. Sending a shard through a socket, or copying it again, would take
cores from training. The memory is an anonymous file (``memfd``): it has no name that a
killed run could leave behind, and it is freed with the last process that has it mapped.

The memory of all slots is allocated and touched at once. Otherwise the first copy into a
slot would fault in every page, which takes many times as long as a later copy, and it would
happen in the middle of the run, when a slow server makes one more slot necessary. That copy
would not have ended when the next optimizer step begins.
"""

import mmap
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchtitan.grpo.weight_sync.slot_layout import PushPlan, Shards, SlotLayout, pieces_of
from torchtitan.grpo.weight_sync.slot_storage import SlotStorage

CAN_SHARE = hasattr(os, "memfd_create")
"""Whether the system has memory files, as Linux does. Without them ranks send their shards."""

_SECRET_BYTES = 16


@dataclass(frozen=True)
class SlotOffer:
    """What another rank needs in order to write into this rank's slots.

    Attributes:
        path: Path of the owner's file on its host, valid while the owner lives.
        secret: Last bytes of the file. On another host the same path may name another file.
        slot_bytes: Number of bytes of a slot.
        num_slots: Number of slots, which follow one another.
    """

    path: str
    secret: bytes
    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the file."""
        return self.slot_bytes * self.num_slots + _SECRET_BYTES

    def slots_in(self, memory: mmap.mmap) -> list[torch.Tensor]:
        """Returns each slot as a [slot_bytes] uint8 tensor, which keeps the memory mapped."""
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return list(flat[:-_SECRET_BYTES].split(self.slot_bytes))


class SharedSlots:
    """A source's slots, initialized with zeros.

    Args:
        slot_bytes: Number of bytes of a slot.
        num_slots: Number of slots.

    Attributes:
        slots: Each slot as a [slot_bytes] uint8 tensor.
        offer: What other ranks need in order to attach.
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
        """Lets nobody else map the slots. Processes that have them mapped keep them."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def attach(offer: SlotOffer) -> list[torch.Tensor] | None:
    """Maps the slots of another rank; returns ``None`` if they cannot be reached.

    They cannot be reached from another host or container, or by another user.
    """
    try:
        file = os.open(offer.path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != offer.num_bytes:
            return None
        memory = _mapped(file, offer.num_bytes)
    except (OSError, ValueError):  # the path names something that cannot be mapped
        return None
    finally:
        os.close(file)
    if memory[-_SECRET_BYTES:] != offer.secret:
        return None
    return offer.slots_in(memory)


def _mapped(file: int, num_bytes: int) -> mmap.mmap:
    """Maps all of a memory file, with every page already allocated."""
    return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def own_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocates memory that no other rank writes, with every page already touched."""
    return torch.empty(shape, dtype=dtype).zero_()


class SharedHostSlots(SlotStorage):
    """See the module's docstring. Constructed on all ranks at the same time.

    Ranks that cannot reach the memory of their source copy into memory of their own, and
    send their shards to the source.

    Args:
        plan: What each rank sends.
        num_slots: Number of slots.
    """

    def __init__(self, plan: PushPlan, num_slots: int) -> None:
        self.device = torch.device("cpu")
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
        self._writers = _who_reaches(set(memory) - {rank})
        if shared is not None:
            shared.close()
        self.shards = [_shards_in(plan, memory, slot, rank) for slot in range(num_slots)]
        self._buckets: list[list[torch.Tensor]] | None = None
        self._shards_of_writers: list[dict[int, Shards]] = [{} for _ in range(num_slots)]
        if own is not None:
            layout, writers = plan.layouts[rank], self._writers.get(rank, ())
            self._buckets = [layout.buckets_in(slot) for slot in memory[rank]]
            self._shards_of_writers = [
                {writer: layout.shards_in(slot, writer) for writer in writers}
                for slot in memory[rank]
            ]

    def buckets(self, slot: int) -> list[torch.Tensor] | None:
        return None if self._buckets is None else self._buckets[slot]

    def writers(self, source: int) -> Collection[int]:
        return self._writers.get(source, ())

    def shards_of_writers(self, slot: int) -> Mapping[int, Shards]:
        return self._shards_of_writers[slot]


def _attached(shared: SharedSlots | None, wanted: list[int]) -> dict[int, list[torch.Tensor]]:
    """Maps the slots of other ranks that can be reached; collective over all ranks."""
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
    """Returns by source which other ranks have mapped its slots; collective over all ranks."""
    reached_by: list[set[int]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(reached_by, reached)
    return {
        source: {rank for rank, those in enumerate(reached_by) if source in those}
        for source in set().union(*reached_by)
    }


def _shards_in(
    plan: PushPlan, memory: Mapping[int, list[torch.Tensor]], slot: int, rank: int
) -> dict[str, torch.Tensor]:
    """Returns where a rank copies its shards: into its sources' memory, or into its own."""
    shards: dict[str, torch.Tensor] = {}
    for source in plan.sources:
        if rank in source.members:
            layout = plan.layouts[source.rank]
            if source.rank in memory:
                shards |= layout.shards_in(memory[source.rank][slot], rank)
            else:
                shards |= _own_shards(layout, rank)
    return shards


def _own_shards(layout: SlotLayout, rank: int) -> dict[str, torch.Tensor]:
    return {
        assembly.name: own_memory(piece.block.shape, layout.dtype)
        for assembly, piece in pieces_of(layout.assemblies, rank)
    }
