# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Allocates snapshot slots in the host memory of their source, where ranks of the same host write.

Each rank copies its shards directly into the buckets from which its source sends (see
`system/shared_slots.py`). Sending a shard through a socket, or copying it again, would take
cores from training. On GPUs, copy engines write the slots, and each process pins the memory for
this purpose. No version occupies GPU memory, and no kernel gathers a version.

The memory of all slots is allocated at the start. Otherwise, a slow server could make one more
slot necessary in the middle of the run, and the copy into that slot would not have ended when
the next optimizer step begins.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from torchtitan.grpo.system.host_memory import (
    CAN_SHARE,
    SharedSlots,
    SlotOffer,
    attach,
    own_memory,
    pin,
)
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, Shards, pieces_of


class SnapshotSlots:
    """Allocates the slots of this rank and maps the slots of other ranks on the same host.

    All ranks must construct it at the same time. A rank that cannot map the memory of its
    source copies its shards into its own memory and sends them to the source. Slots that a GPU
    writes must be ``pinned``.

    ``shards`` holds for each slot the tensors into which this rank copies its shards, by native
    name and in the wire dtype.
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
        memory |= _attached(
            shared, [s.rank for s in plan.sources if rank in s.members and s is not own]
        )
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
        self._shards_of_writers: list[dict[int, Shards]] = [{} for _ in range(num_slots)]
        if own is not None:
            layout, writers = plan.layouts[rank], self._writers.get(rank, ())
            self._buckets = [layout.buckets_in(slot) for slot in memory[rank]]
            self._shards_of_writers = [
                {writer: layout.shards_in(slot, writer) for writer in writers}
                for slot in memory[rank]
            ]

    def buckets(self, slot: int) -> list[torch.Tensor] | None:
        """Returns this source's buckets in a slot, or ``None`` if this rank is not a source."""
        return None if self._buckets is None else self._buckets[slot]

    def writers(self, source: int) -> Collection[int]:
        """Returns the ranks other than ``source`` that copy directly into its slots."""
        return self._writers.get(source, ())

    def shards_of_writers(self, slot: int) -> Mapping[int, Shards]:
        """Returns the shards that other ranks copied into this source's slot, by rank."""
        return self._shards_of_writers[slot]


def _attached(shared: SharedSlots | None, wanted: list[int]) -> dict[int, list[torch.Tensor]]:
    """Maps the slots of those wanted ranks whose memory can be shared; collective."""
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
    """Allocates one slot for a rank's shards of those sources whose memory it has not mapped."""
    return {
        assembly.name: own_memory(piece.block.shape, layout.dtype)
        for source, layout in plan.layouts.items()
        if source not in memory
        for assembly, piece in pieces_of(layout.assemblies, rank)
    }
