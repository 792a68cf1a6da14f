# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Snapshot slots in memory that the other ranks of a host can read.

Where ranks train on the processors of one host, a source copies their shards right out of
their slots: a shard that went through a socket would cost two copies and a core on either
side. The memory is an anonymous file (``memfd``): it has no name that a killed run could
leave behind, and is gone with the last process that has it mapped.
"""

import mmap
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Shards = Mapping[str, torch.Tensor]
"""A rank's part of each of its parameters, by name."""

CAN_SHARE = hasattr(os, "memfd_create")
"""Linux has memory files; elsewhere ranks send their shards."""

_ALIGNMENT = 64  # of each tensor, in bytes: a cache line
_SECRET_BYTES = 16


@dataclass(frozen=True)
class SlotOffer:
    """What another rank needs to read this one's slots.

    Attributes:
        path: Under which the owner's file can be opened on its host, while the owner lives.
        secret: What stands at the file's end. Elsewhere the path may name another file.
        dtype: Of all tensors.
        places: Offset within a slot in bytes, and shape, of each tensor.
        slot_bytes: Size of a slot.
        num_slots: How many follow one another.
    """

    path: str
    secret: bytes
    dtype: torch.dtype
    places: dict[str, tuple[int, tuple[int, ...]]]
    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.slot_bytes * self.num_slots + _SECRET_BYTES

    def slots_in(self, memory: mmap.mmap) -> list[dict[str, torch.Tensor]]:
        """The tensors of each slot; they keep the memory mapped."""
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        slots = []
        for slot in range(self.num_slots):
            tensors = {}
            for name, (offset, shape) in self.places.items():
                begin = slot * self.slot_bytes + offset
                size = torch.Size(shape).numel() * self.dtype.itemsize
                tensors[name] = flat[begin : begin + size].view(self.dtype).view(shape)
            slots.append(tensors)
        return slots


class SharedSlots:
    """This rank's slots; zeros at first.

    Args:
        shapes: Of the tensors of a slot, by name.
        num_slots: How many slots.
        dtype: Of all tensors.

    Attributes:
        slots: The tensors of each slot, in plain order.
        offer: For other ranks.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], num_slots: int, dtype: torch.dtype
    ) -> None:
        places, end = {}, 0
        for name, shape in shapes.items():
            places[name] = (end, shape)
            size = torch.Size(shape).numel() * dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._file = os.memfd_create("grpo-snapshot-slots")
        self.offer = SlotOffer(
            path=f"/proc/{os.getpid()}/fd/{self._file}",
            secret=secrets.token_bytes(_SECRET_BYTES),
            dtype=dtype,
            places=places,
            slot_bytes=end,
            num_slots=num_slots,
        )
        os.ftruncate(self._file, self.offer.num_bytes)
        memory = mmap.mmap(self._file, self.offer.num_bytes)
        memory[-_SECRET_BYTES:] = self.offer.secret
        self.slots = self.offer.slots_in(memory)

    def close(self) -> None:
        """Nobody else can map the slots any more; whoever has them mapped keeps them."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def attach(offer: SlotOffer) -> list[dict[str, torch.Tensor]] | None:
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
        memory = mmap.mmap(file, offer.num_bytes)
    except (OSError, ValueError):  # not a file that can be mapped
        return None
    finally:
        os.close(file)
    if memory[-_SECRET_BYTES:] != offer.secret:
        return None
    return offer.slots_in(memory)


def attach_all(
    offer: SlotOffer | None, wanted: Collection[int]
) -> tuple[dict[int, Sequence[Shards]], list[set[int]]]:
    """Maps the slots of other ranks as far as they can be reached; collective over all ranks.

    Args:
        offer: This rank's; None where its slots are not in shared memory.
        wanted: The ranks whose slots this one wants to read.

    Returns:
        The slots of those that it can read, by rank; and whose slots each rank can read.
    """
    offers: list[SlotOffer | None] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, offer)
    reached: dict[int, Sequence[Shards]] = {}
    for rank in sorted(wanted):
        offered = offers[rank]
        slots = attach(offered) if offered is not None else None
        if slots is not None:
            reached[rank] = slots
    reached_by: list[set[int]] = [set() for _ in offers]
    dist.all_gather_object(reached_by, set(reached))
    return reached, reached_by
