# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From shards to full tensors with Hugging Face names, in buckets, on the source ranks.

Runs on a thread of its own on every rank, on process groups of its own: two threads must
not issue collectives on one communicator. What each rank sends is settled once, at
construction, for the whole model and every layout; see `plan.py`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchtitan.protocols import BaseStateDictAdapter

from torchtitan.grpo.models.collect import Collector, agree_on_assembly, collecting_group
from torchtitan.grpo.models.hf_weights import is_only_renamed
from torchtitan.grpo.weight_sync.payloads import Payload
from torchtitan.grpo.weight_sync.plan import BucketPlan, SourcePlan, plan_sources
from torchtitan.grpo.weight_sync.shared_slots import SharedSlots, attach_all


@dataclass(frozen=True)
class _Place:
    """The bytes of one parameter in the bucket of this index."""

    name: str
    shape: tuple[int, ...]
    bucket: int
    begin: int
    end: int


def _places(source: SourcePlan, names: Collection[str], wire_dtype: torch.dtype) -> list[_Place]:
    """Of the parameters in ``names``, each of which is one tensor of its bucket."""
    places = []
    for index, plan in enumerate(source.buckets):
        begin = 0
        for assembly in plan.assemblies:
            end = begin + plan.num_bytes_of[assembly.name]
            if assembly.name in names:
                places.append(_Place(assembly.name, assembly.shape, index, begin, end))
            begin = end
    return places


class Gatherer:
    """One rank's part in the gathering. Constructed on all ranks at the same time.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        adapter: Of the model family.
        wire_dtype: Dtype of the snapshots and of the buckets.
        bucket_bytes: See :func:`plan_buckets`.
        backend: Of the gathering groups: that of the snapshots' device.
        timeout_seconds: Bound of one transfer.
        device: Where the snapshots lie.
        shared: This rank's slots where other ranks may read them; see `shared_slots.py`.

    Attributes:
        sources: The whole plan, the same on every rank.
        own: This rank's part of it; None where this rank is no source.
        read_in_place: The ranks whose slots this one reads where they lie.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        adapter: BaseStateDictAdapter,
        *,
        wire_dtype: torch.dtype,
        bucket_bytes: int,
        backend: str,
        timeout_seconds: float,
        device: torch.device,
        shared: SharedSlots | None = None,
    ) -> None:
        self._adapter, self._device, self._wire_dtype = adapter, device, wire_dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        rank = dist.get_rank()
        assemblies = agree_on_assembly(parameters, adapter)
        self.sources = plan_sources(assemblies, adapter, wire_dtype, bucket_bytes)
        self.own = next((source for source in self.sources if source.rank == rank), None)
        renamed = {a.name for a in assemblies if is_only_renamed(adapter, a.name, a.shape)}
        self._places = _places(self.own, renamed, wire_dtype) if self.own is not None else []
        others = set(self.own.members) - {rank} if self.own is not None else set()
        self._slots_of, reached_by = attach_all(shared.offer if shared else None, others)
        self.read_in_place = reached_by[rank]
        if shared is not None:
            shared.close()
        # Every rank makes every group; it takes part in those it is a member of.
        self._collectors: list[tuple[SourcePlan, Collector]] = []
        for source in self.sources:
            group = collecting_group(source.members, backend, timeout_seconds, device)
            if rank in source.members:
                buckets = [plan.assemblies for plan in source.buckets]
                in_place = reached_by[source.rank]
                collector = Collector(buckets, wire_dtype, device, group, source.rank, in_place)
                self._collectors.append((source, collector))

    def gather(
        self, slot: int, shards: Mapping[str, torch.Tensor], payload: Payload | None
    ) -> None:
        """All ranks take part; a source fills its payload, bucket by bucket.

        Args:
            slot: Where all ranks have their shards of this version.
            shards: This rank's part of each of its parameters.
            payload: What is filled, on source ranks; None elsewhere.
        """
        assert (payload is not None) == (self.own is not None)
        if self._stream is None:
            return self._gather(slot, shards, payload)
        # Device and stream are a thread's own choice, and this is not the training thread.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            self._gather(slot, shards, payload)
        self._stream.synchronize()
        return None

    def _gather(
        self, slot: int, shards: Mapping[str, torch.Tensor], payload: Payload | None
    ) -> None:
        for source, collector in self._collectors:
            if source is not self.own:
                # Nothing is received, and this is what sends.
                for _ in collector.collect(shards):
                    raise AssertionError("only a source receives")
            else:
                assert payload is not None
                others = {rank: slots[slot] for rank, slots in self._slots_of.items()}
                places = self._places_in(payload)
                self._fill_all(collector.collect(shards, others=others, places=places), payload)

    def _fill_all(self, whole: Iterator[tuple[str, torch.Tensor]], payload: Payload) -> None:
        assert self.own is not None
        for index, plan in enumerate(self.own.buckets):
            self._fill(plan, whole, payload.buffers[index])
            if self._stream is not None:
                self._stream.synchronize()  # other threads and streams read it next
            payload.filled(index)
        for name, _ in whole:
            raise AssertionError(f"{name} is in no bucket")

    def _places_in(self, payload: Payload) -> dict[str, torch.Tensor]:
        """Where parameters that are only renamed are put together: in their buckets already."""
        return {
            place.name: payload.buffers[place.bucket][place.begin : place.end]
            .view(self._wire_dtype)
            .view(place.shape)
            for place in self._places
            if payload.buffers[place.bucket].device.type == self._device.type
        }

    def _fill(
        self, plan: BucketPlan, whole: Iterator[tuple[str, torch.Tensor]], buffer: torch.Tensor
    ) -> None:
        position = 0
        for assembly in plan.assemblies:
            name, full = next(whole)
            assert name == assembly.name, (name, assembly.name)
            for tensor in self._adapter.to_hf({name: full}).values():
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                part = buffer[position : position + flat.numel()]
                if part.data_ptr() != flat.data_ptr():  # else it was put together there
                    part.copy_(flat)
                position += flat.numel()
        assert position == plan.num_bytes, (plan.spec.names, position)
