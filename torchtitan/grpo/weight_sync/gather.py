# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From shards to full tensors with Hugging Face names, in buckets, on the source ranks.

Runs on a thread of its own on every rank, on process groups of its own: two threads must
not issue collectives on one communicator. What each rank sends is settled once, at
construction, for the whole model and every layout; see `plan.py`. Where ranks write into
their source's memory (see `slot_memory.py`) there is little left to do: buckets that lie in
the slot are whole as soon as all ranks have copied, but for what must be converted.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torchtitan.protocols import BaseStateDictAdapter

from torchtitan.grpo.models.collect import Collector, agree_on_assembly, collecting_group
from torchtitan.grpo.weight_sync.payloads import Payload
from torchtitan.grpo.weight_sync.plan import BucketPlan, SourcePlan, plan_sources
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, lay_out_slot
from torchtitan.grpo.weight_sync.slot_memory import RankSlots


def agree_on_push(
    parameters: Mapping[str, torch.Tensor],
    adapter: BaseStateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
) -> PushPlan:
    """Settles once what each rank sends; collective over all ranks.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        adapter: Of the model family.
        wire_dtype: Dtype of the snapshots and of the buckets.
        bucket_bytes: See :func:`plan_buckets`.
    """
    assemblies = agree_on_assembly(parameters, adapter)
    sources = plan_sources(assemblies, adapter, wire_dtype, bucket_bytes)
    layouts = {source.rank: lay_out_slot(source, adapter, wire_dtype) for source in sources}
    return PushPlan(sources, layouts, wire_dtype)


class Gatherer:
    """One rank's part in the gathering. Constructed on all ranks at the same time.

    Args:
        plan: Of all ranks.
        slots: Where shards are copied to.
        adapter: Of the model family.
        backend: Of the gathering groups: that of the snapshots' device.
        timeout_seconds: Bound of one transfer.
        device: Where the snapshots lie.

    Attributes:
        own: What this rank is the source of; None where it is none.
    """

    def __init__(
        self,
        plan: PushPlan,
        slots: RankSlots,
        adapter: BaseStateDictAdapter,
        *,
        backend: str,
        timeout_seconds: float,
        device: torch.device,
    ) -> None:
        self._adapter, self._device, self._slots = adapter, device, slots
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        rank = dist.get_rank()
        self.own = plan.source(rank)
        self._layout = plan.layouts.get(rank)
        # Every rank makes every group; it takes part in those it is a member of.
        self._collectors: list[tuple[SourcePlan, Collector]] = []
        for source in plan.sources:
            group = collecting_group(source.members, backend, timeout_seconds, device)
            if rank in source.members:
                buckets = [bucket.assemblies for bucket in source.buckets]
                in_place = slots.in_place.get(source.rank, ())
                collector = Collector(
                    buckets, plan.wire_dtype, device, group, source.rank, in_place
                )
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
                others = self._slots.others[slot] if self._slots.others else {}
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
        """Where parameters that travel as they are are put together: in their buckets already."""
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
                if part.data_ptr() != flat.data_ptr():  # else it was put together there
                    part.copy_(flat)
                position += flat.numel()
        assert position == plan.num_bytes, (plan.spec.names, position)
