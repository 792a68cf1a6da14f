# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From shards to full tensors with Hugging Face names, in buckets, on the source ranks.

Runs on a thread of its own on every rank, on process groups of its own: two threads must
not issue collectives on one communicator. What each rank sends is settled once, at
construction, for the whole model and every layout; see `plan.py`.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torchtitan.protocols import BaseStateDictAdapter

from torchtitan.grpo.models.collect import Collector, agree_on_assembly, collecting_group
from torchtitan.grpo.weight_sync.payloads import Payload
from torchtitan.grpo.weight_sync.plan import BucketPlan, SourcePlan, plan_sources


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

    Attributes:
        sources: The whole plan, the same on every rank.
        own: This rank's part of it; None where this rank is no source.
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
    ) -> None:
        self._adapter, self._device = adapter, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        rank = dist.get_rank()
        assemblies = agree_on_assembly(parameters, adapter)
        self.sources = plan_sources(assemblies, adapter, wire_dtype, bucket_bytes)
        self.own = next((source for source in self.sources if source.rank == rank), None)
        # Every rank makes every group; it takes part in those it is a member of.
        self._collectors: list[tuple[SourcePlan, Collector]] = []
        for source in self.sources:
            group = collecting_group(source.members, backend, timeout_seconds, device)
            if rank in source.members:
                buckets = [plan.assemblies for plan in source.buckets]
                collector = Collector(buckets, wire_dtype, device, group, receiver=source.rank)
                self._collectors.append((source, collector))

    def gather(self, shards: Mapping[str, torch.Tensor], payload: Payload | None) -> None:
        """All ranks take part; a source fills its payload, bucket by bucket.

        Args:
            shards: This rank's part of each of its parameters.
            payload: What is filled, on source ranks; None elsewhere.
        """
        assert (payload is not None) == (self.own is not None)
        if self._stream is None:
            return self._gather(shards, payload)
        # Device and stream are a thread's own choice, and this is not the training thread.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            self._gather(shards, payload)
        self._stream.synchronize()
        return None

    def _gather(self, shards: Mapping[str, torch.Tensor], payload: Payload | None) -> None:
        for source, collector in self._collectors:
            whole = collector.collect(shards)
            if source is self.own:
                assert payload is not None
                for index, plan in enumerate(source.buckets):
                    self._fill(plan, whole, payload.buffers[index])
                    if self._stream is not None:
                        self._stream.synchronize()  # other threads and streams read it next
                    payload.filled(index)
            # Where nothing is received, this is what sends.
            assert next(whole, None) is None

    def _fill(
        self, plan: BucketPlan, whole: Iterator[tuple[str, torch.Tensor]], buffer: torch.Tensor
    ) -> None:
        position = 0
        for assembly in plan.assemblies:
            name, full = next(whole)
            assert name == assembly.name, (name, assembly.name)
            for tensor in self._adapter.to_hf({name: full}).values():
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                buffer[position : position + flat.numel()].copy_(flat)
                position += flat.numel()
        assert position == plan.num_bytes, (plan.spec.names, position)
