# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Meshes, the norm of gradients over them, the device of the process, and garbage collection."""

from dataclasses import fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils
from torchtitan.tools.utils import GarbageCollection

_FIELDS = {field.name for field in fields(ParallelDims)}


def parallel_dims(settings: Any, world_size: int) -> ParallelDims:
    """Returns the meshes of ``[parallelism]``."""
    # 0.2 can divide each expert, which is not used; 0.3 has several families of meshes.
    extra: dict[str, Any] = {"etp": 1, "spmd_backend": "partial_dtensor"}
    return ParallelDims(
        dp_replicate=settings.data_parallel_replicate_degree,
        dp_shard=settings.data_parallel_shard_degree,
        cp=settings.context_parallel_degree,
        tp=settings.tensor_parallel_degree,
        pp=settings.pipeline_parallel_degree,
        ep=settings.expert_parallel_degree,
        world_size=world_size,
        **{name: value for name, value in extra.items() if name in _FIELDS},
    )


def replicas_mesh(dims: ParallelDims) -> DeviceMesh:
    """Returns the mesh of replicas, even if there is only one replica."""
    mesh = dims.get_optional_mesh("dp_replicate")
    if mesh is None:
        name = "_meshes" if "_meshes" in _FIELDS else "_single_axis_meshes"
        mesh = getattr(dims, name)["dp_replicate"]
    return mesh
