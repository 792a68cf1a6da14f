# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From shards to full tensors with Hugging Face names, in buckets.

Runs on the pusher's thread of every rank, on a process group of its own: two threads must
not issue collectives on one communicator. What each rank sends is settled once, at
construction, for the whole model and every layout; see `models/shards.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchtitan.protocols import BaseStateDictAdapter

from torchtitan.grpo.inference.client import BucketSpec
from torchtitan.grpo.models.collect import (
    RECEIVER,
    Collector,
    agree_on_assembly,
    collecting_group,
)
from torchtitan.grpo.models.hf_weights import hf_meta
from torchtitan.grpo.models.shards import Assembly, in_buckets
from torchtitan.grpo.weight_sync.connection import Bucket


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: which native parameters it needs, and what it holds.

    Attributes:
        assemblies: How its parameters are put together, in the order of the bytes.
        spec: Hugging Face names, dtypes and shapes, in the order of the bytes.
        num_bytes: Size of the payload.
    """

    assemblies: tuple[Assembly, ...]
    spec: BucketSpec
    num_bytes: int


def plan_buckets(
    assemblies: Sequence[Assembly],
    adapter: BaseStateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
) -> list[BucketPlan]:
    """Cuts the model into buckets of at most ``bucket_bytes``, or of one parameter.

    Pure: equal on all ranks, whatever they hold.
    """
    metas = {a.name: hf_meta(adapter, a.name, a.shape) for a in assemblies}

    def num_bytes(assembly: Assembly) -> int:
        return sum(m.numel() * wire_dtype.itemsize for m in metas[assembly.name].values())

    plans = []
    for members in in_buckets(assemblies, num_bytes, bucket_bytes):
        shapes = {key: tuple(m.shape) for a in members for key, m in metas[a.name].items()}
        spec = BucketSpec(
            names=tuple(shapes),
            dtypes=(str(wire_dtype).removeprefix("torch."),) * len(shapes),
            shapes=tuple(shapes.values()),
        )
        plans.append(BucketPlan(tuple(members), spec, sum(map(num_bytes, members))))
    return plans


class Gatherer:
    """Turns a snapshot into full buckets. Constructed on all ranks at the same time.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        adapter: Of the model family.
        wire_dtype: Dtype of the snapshots and of the buckets.
        bucket_bytes: See :func:`plan_buckets`.
        backend: Of the gathering group: that of the training device.
        timeout_seconds: Bound of one transfer.
        payload_device: Where the buckets lie: the device that the weight groups send from.
        device: The training device.

    Attributes:
        plans: The buckets.
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
        payload_device: torch.device,
        device: torch.device,
    ) -> None:
        self._adapter, self._device, self._payload_device = adapter, device, payload_device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        assemblies = agree_on_assembly(parameters, adapter)
        self.plans = plan_buckets(assemblies, adapter, wire_dtype, bucket_bytes)
        self._collector = Collector(
            [plan.assemblies for plan in self.plans],
            wire_dtype,
            device,
            collecting_group(assemblies, backend, timeout_seconds, device),
        )

    def new_buffers(self) -> list[torch.Tensor]:
        """Room for one version: a uint8 tensor for each bucket."""
        return [
            torch.empty(plan.num_bytes, dtype=torch.uint8, device=self._payload_device)
            for plan in self.plans
        ]

    def gather(
        self, shards: Mapping[str, torch.Tensor], buffers: list[torch.Tensor] | None
    ) -> list[Bucket]:
        """All ranks take part; rank 0 gets the buckets, in the buffers that it gives."""
        assert (buffers is not None) == (dist.get_rank() == RECEIVER)
        if self._stream is None:
            return self._gather(shards, buffers or [])
        # Device and stream are a thread's own choice, and this is not the training thread.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            buckets = self._gather(shards, buffers or [])
        self._stream.synchronize()
        return buckets

    def _gather(
        self, shards: Mapping[str, torch.Tensor], buffers: list[torch.Tensor]
    ) -> list[Bucket]:
        whole = self._collector.collect(shards)
        buckets = [
            self._fill(plan, whole, buffer)
            for plan, buffer in zip(self.plans, buffers, strict=bool(buffers))
        ]
        # Where nothing is received, this is what sends.
        assert next(whole, None) is None
        return buckets

    def _fill(
        self, plan: BucketPlan, whole: Iterator[tuple[str, torch.Tensor]], buffer: torch.Tensor
    ) -> Bucket:
        position = 0
        for assembly in plan.assemblies:
            name, full = next(whole)
            assert name == assembly.name, (name, assembly.name)
            for tensor in self._adapter.to_hf({name: full}).values():
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                buffer[position : position + flat.numel()].copy_(flat)
                position += flat.numel()
        assert position == plan.num_bytes, (plan.spec.names, position)
        return Bucket(plan.spec, buffer)
