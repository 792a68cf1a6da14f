# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From shards to full tensors with Hugging Face names, in buckets, on the source ranks.

Gathering runs on a thread of its own on every rank, and on process groups of its own,
because two threads must not issue collectives on one communicator. What each rank sends is
decided once, at construction, for every layout; see `plan.py`. If ranks write into their
source's memory (see `slot_memory.py`), the buckets that lie in the slot are complete as soon
as all ranks have copied, except for parameters that must be converted.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torchtitan.protocols import BaseStateDictAdapter

from torchtitan.grpo.models.collect import Collector, agree_on_assembly, collecting_group
from torchtitan.grpo.system.device import default_backend
from torchtitan.grpo.weight_sync.payloads import Payload
from torchtitan.grpo.weight_sync.plan import (
    ALL_PARAMETERS,
    BucketPlan,
    ParameterSelection,
    SourcePlan,
    plan_sources,
)
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, lay_out_slot
from torchtitan.grpo.weight_sync.slot_storage import SlotStorage


def agree_on_push(
    parameters: Mapping[str, torch.Tensor],
    adapter: BaseStateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
    selection: ParameterSelection = ALL_PARAMETERS,
) -> PushPlan:
    """Decides what each rank sends; collective over all ranks.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        adapter: State-dict adapter of the model family.
        wire_dtype: Dtype of the snapshots and of the buckets.
        bucket_bytes: See :func:`plan_buckets`.
        selection: The parameters that are pushed.
    """
    assemblies = [a for a in agree_on_assembly(parameters, adapter) if selection.includes(a.name)]
    sources = plan_sources(assemblies, adapter, wire_dtype, bucket_bytes)
    layouts = {source.rank: lay_out_slot(source, adapter, wire_dtype) for source in sources}
    return PushPlan(selection, sources, layouts, wire_dtype)


class Gatherer:
    """Does one rank's part of gathering versions on their source ranks.

    All ranks must construct it at the same time.

    Args:
        plan: What each rank sends.
        storage: The snapshot slots, as this rank sees them.
        adapter: State-dict adapter of the model family.
        timeout_seconds: Maximum duration of one transfer between ranks.

    Attributes:
        own: What this rank sends to servers; ``None`` if it is not a source.
    """

    def __init__(
        self,
        plan: PushPlan,
        storage: SlotStorage,
        adapter: BaseStateDictAdapter,
        timeout_seconds: float,
    ) -> None:
        device = storage.device
        self._adapter, self._device, self._storage = adapter, device, storage
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        backend = default_backend(device.type)
        rank = dist.get_rank()
        self.own = plan.source(rank)
        self._layout = plan.layouts.get(rank)
        # Every rank must take part in the creation of every group, also as no member of it.
        self._collectors: list[tuple[SourcePlan, Collector]] = []
        for source in plan.sources:
            group = collecting_group(source.members, backend, timeout_seconds, device)
            if rank in source.members:
                buckets = [bucket.assemblies for bucket in source.buckets]
                writers = storage.writers(source.rank)
                collector = Collector(buckets, plan.wire_dtype, device, group, source.rank, writers)
                self._collectors.append((source, collector))

    def gather(
        self, slot: int, shards: Mapping[str, torch.Tensor], payload: Payload | None
    ) -> None:
        """Gathers a version: all ranks take part, and a source fills its payload in order.

        Args:
            slot: Slot in which all ranks have their shards of the version.
            shards: This rank's part of each of its parameters.
            payload: The payload to fill on a source rank; ``None`` on other ranks.
        """
        assert (payload is not None) == (self.own is not None)
        if self._stream is None:
            return self._gather(slot, shards, payload)
        # Each thread has its own current device and stream, and this is not the training thread.
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
                # Iterating is what sends; nothing is received here.
                for _ in collector.collect(shards):
                    raise AssertionError("only the source rank may receive shards")
            else:
                assert payload is not None
                others = self._storage.shards_of_writers(slot)
                places = self._places_in(payload)
                self._fill_all(collector.collect(shards, others=others, places=places), payload)

    def _fill_all(self, whole: Iterator[tuple[str, torch.Tensor]], payload: Payload) -> None:
        assert self.own is not None
        for index, plan in enumerate(self.own.buckets):
            self._fill(plan, whole, payload.buffers[index])
            if self._stream is not None:
                self._stream.synchronize()  # other threads and streams read the bucket next
            payload.filled(index)
        for name, _ in whole:
            raise AssertionError(f"parameter {name} must be in a bucket, but is in none")

    def _places_in(self, payload: Payload) -> dict[str, torch.Tensor]:
        """Returns where parameters that are not converted are put together: in their buckets."""
        assert self._layout is not None
        if payload.buffers[0].device.type != self._device.type:
            return {}
        return self._layout.wholes_in(payload.buffers)

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
                if part.data_ptr() != flat.data_ptr():  # otherwise it was put together in place
                    part.copy_(flat)
                position += flat.numel()
        assert position == plan.num_bytes, (plan.spec.names, position)
