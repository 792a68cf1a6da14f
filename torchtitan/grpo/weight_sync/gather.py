# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From shards to full tensors with Hugging Face names, in buckets.

Runs on the pusher's thread of every rank, on process groups of its own: two threads must
not issue collectives on one communicator. The groups mirror the meshes of the model's
parameters, so DTensor itself knows how any layout is put together again.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.protocols import BaseStateDictAdapter

from torchtitan.grpo.groups import new_group
from torchtitan.grpo.inference.client import BucketSpec
from torchtitan.grpo.models.hf_weights import hf_meta
from torchtitan.grpo.weight_sync.connection import Bucket


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: which native parameters it needs, and what it holds.

    Attributes:
        parameters: Native names, in the order in which they are gathered.
        spec: Hugging Face names, dtypes and shapes, in the order of the bytes.
        num_bytes: Size of the payload.
    """

    parameters: tuple[str, ...]
    spec: BucketSpec
    num_bytes: int


def plan_buckets(
    parameters: dict[str, torch.Tensor],
    adapter: BaseStateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
) -> list[BucketPlan]:
    """Cuts the model into buckets of at most ``bucket_bytes``, or of one parameter.

    Pure: equal on all ranks that hold the same parameters.
    """
    plans: list[BucketPlan] = []
    members: list[str] = []
    tensors: dict[str, torch.Tensor] = {}

    def num_bytes(metas: dict[str, torch.Tensor]) -> int:
        return sum(meta.numel() * wire_dtype.itemsize for meta in metas.values())

    def close_bucket() -> None:
        spec = BucketSpec(
            names=tuple(tensors),
            dtypes=(str(wire_dtype).removeprefix("torch."),) * len(tensors),
            shapes=tuple(tuple(meta.shape) for meta in tensors.values()),
        )
        plans.append(BucketPlan(tuple(members), spec, num_bytes(tensors)))
        members.clear()
        tensors.clear()

    for name, parameter in parameters.items():
        metas = hf_meta(adapter, name, parameter)
        if members and num_bytes(tensors) + num_bytes(metas) > bucket_bytes:
            close_bucket()
        members.append(name)
        tensors.update(metas)
    close_bucket()
    return plans


class Gatherer:
    """Turns a snapshot into full buckets. Constructed on all ranks at the same time.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        adapter: Of the model family.
        plans: See :func:`plan_buckets`.
        backend: Of the gathering groups: that of the training device.
        timeout_seconds: Bound of one collective.
        payload_device: Where the buckets lie: the device that the weight groups send from.
        device: The training device.
    """

    def __init__(
        self,
        parameters: dict[str, torch.Tensor],
        adapter: BaseStateDictAdapter,
        plans: list[BucketPlan],
        backend: str,
        timeout_seconds: float,
        payload_device: torch.device,
        device: torch.device,
    ) -> None:
        self._adapter, self._plans = adapter, plans
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._layouts = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
        self._meshes = _mirror_meshes(
            [p.device_mesh for p in self._layouts.values()], backend, timeout_seconds
        )
        self._payload_device = payload_device

    def new_buffers(self) -> list[torch.Tensor]:
        """Room for one version: a uint8 tensor for each bucket."""
        return [
            torch.empty(plan.num_bytes, dtype=torch.uint8, device=self._payload_device)
            for plan in self._plans
        ]

    def gather(
        self, shards: dict[str, torch.Tensor], buffers: list[torch.Tensor] | None
    ) -> list[Bucket]:
        """All ranks gather; who gives ``buffers`` gets the buckets, in those buffers."""
        if self._stream is None:
            return self._gather(shards, buffers)
        # Device and stream are a thread's own choice, and this is not the training thread.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            buckets = self._gather(shards, buffers)
        self._stream.synchronize()
        return buckets

    @torch.no_grad()
    def _gather(
        self, shards: dict[str, torch.Tensor], buffers: list[torch.Tensor] | None
    ) -> list[Bucket]:
        buckets = []
        for index, plan in enumerate(self._plans):
            position = 0
            for name in plan.parameters:
                full = self._full(name, shards[name])
                if buffers is None:
                    continue
                for tensor in self._adapter.to_hf({name: full}).values():
                    flat = tensor.contiguous().view(-1).view(torch.uint8)
                    buffers[index][position : position + flat.numel()].copy_(flat)
                    position += flat.numel()
            if buffers is not None:
                assert position == plan.num_bytes, (plan.spec.names, position)
                buckets.append(Bucket(plan.spec, buffers[index]))
        return buckets

    def _full(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        layout = self._layouts.get(name)
        if layout is None:
            return shard
        return DTensor.from_local(
            shard,
            self._meshes[_mesh_key(layout.device_mesh)],
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=layout.stride(),
        ).full_tensor()


def _mesh_key(mesh: DeviceMesh) -> tuple:
    return tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape), mesh.mesh_dim_names


def _mirror_meshes(
    meshes: list[DeviceMesh], backend: str, timeout_seconds: float
) -> dict[tuple, DeviceMesh]:
    """Meshes of the same shape over fresh process groups; collective over all ranks."""
    distinct = {_mesh_key(mesh): mesh for mesh in meshes}
    mine = {
        tuple(dist.get_process_group_ranks(group))
        for mesh in distinct.values()
        for group in mesh.get_all_groups()
    }
    # Every rank must take part in the making of every group, in one order.
    everyone: list[set[tuple[int, ...]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    groups = {
        ranks: new_group("grpo_gather", backend, timeout_seconds, ranks)
        for ranks in sorted(set().union(*everyone))
    }
    return {
        key: DeviceMesh.from_group(
            [groups[tuple(dist.get_process_group_ranks(g))] for g in mesh.get_all_groups()],
            mesh.device_type,
            mesh=mesh.mesh,
            mesh_dim_names=mesh.mesh_dim_names,
        )
        for key, mesh in distinct.items()
    }
