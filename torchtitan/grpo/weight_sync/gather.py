# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From shards to full tensors with Hugging Face names, in buckets, on the source ranks.

Gathering runs on a thread of its own on every rank, and on process groups of its own,
because two threads must not issue collectives on one communicator. What each rank sends is
decided once, at construction, for every layout; see `plan.py`. If ranks write into their
source's memory (see `slot_memory.py`), the buckets that lie in the slot are complete as soon
as all ranks have copied, except for parameters that must be converted.

Snapshots lie in host memory whatever the training device is, so gathering uses the CPU and
gloo alone. NVIDIA does not promise progress for NCCL communicators that are used at the same
time, and FSDP's are in use while a version is gathered.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torchtitan.protocols import BaseStateDictAdapter

from torchtitan.grpo.models.collect import Collector, agree_on_assembly, collecting_group
from torchtitan.grpo.weight_sync.payloads import Payload
from torchtitan.grpo.weight_sync.plan import (
    ALL_PARAMETERS,
    BucketPlan,
    ParameterSelection,
    SourcePlan,
    plan_sources,
)
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, lay_out_slot
from torchtitan.grpo.weight_sync.slot_memory import SnapshotSlots

_HOST = torch.device("cpu")


def agree_on_push(
    parameters: Mapping[str, torch.Tensor],
    adapter: BaseStateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
    selection: ParameterSelection = ALL_PARAMETERS,
    *,
    contiguous: bool = False,
) -> PushPlan:
    """Decides what each rank sends; collective over all ranks.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        adapter: State-dict adapter of the model family.
        wire_dtype: Dtype of the snapshots and of the buckets.
        bucket_bytes: See :func:`plan_buckets`.
        selection: The parameters that are pushed.
        contiguous: See :func:`lay_out_slot`.
    """
    assemblies = [a for a in agree_on_assembly(parameters, adapter) if selection.includes(a.name)]
    sources = plan_sources(assemblies, adapter, wire_dtype, bucket_bytes)
    layouts = {
        source.rank: lay_out_slot(source, adapter, wire_dtype, contiguous=contiguous)
        for source in sources
    }
    return PushPlan(selection, sources, layouts, wire_dtype)


class Gatherer:
    """Does one rank's part of gathering versions on their source ranks.

    All ranks must construct it at the same time.

    Args:
        plan: What each rank sends.
        slots: The snapshot slots, as this rank sees them.
        adapter: State-dict adapter of the model family.
        timeout_seconds: Maximum duration of one transfer between ranks.

    Attributes:
        own: What this rank sends to servers; ``None`` if it is not a source.
    """

    def __init__(
        self,
        plan: PushPlan,
        slots: SnapshotSlots,
        adapter: BaseStateDictAdapter,
        timeout_seconds: float,
    ) -> None:
        self._adapter, self._slots = adapter, slots
        rank = dist.get_rank()
        self.own = plan.source(rank)
        self._layout = plan.layouts.get(rank)
        # Every rank must take part in the creation of every group, also as no member of it.
        self._collectors: list[tuple[SourcePlan, Collector]] = []
        for source in plan.sources:
            group = collecting_group(source.members, "gloo", timeout_seconds, _HOST)
            if rank in source.members:
                buckets = [bucket.assemblies for bucket in source.buckets]
                writers = slots.writers(source.rank)
                collector = Collector(buckets, plan.wire_dtype, _HOST, group, source.rank, writers)
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
        for source, collector in self._collectors:
            if source is not self.own:
                # Iterating is what sends; nothing is received here.
                for _ in collector.collect(shards):
                    raise AssertionError("only the source rank may receive shards")
            else:
                assert payload is not None
                assert self._layout is not None
                others = self._slots.shards_of_writers(slot)
                # Parameters that are not converted are put together in their buckets.
                places = self._layout.wholes_in(payload.buffers)
                self._fill_all(collector.collect(shards, others=others, places=places), payload)

    def _fill_all(self, whole: Iterator[tuple[str, torch.Tensor]], payload: Payload) -> None:
        assert self.own is not None
        for index, plan in enumerate(self.own.buckets):
            self._fill(plan, whole, payload.buffers[index])
            payload.filled(index)
        for name, _ in whole:
            raise AssertionError(f"parameter {name} must be in a bucket, but is in none")

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
