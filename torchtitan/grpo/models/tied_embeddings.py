# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""FSDP2 for models whose output layer shares the embedding's weight.

Upstream shards the embedding and the output layer as two FSDP groups. Torch refuses a
parameter that two groups manage, so Qwen3's small models, which are tied, would not run.
Here the two, with the norm between them, are one group.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torchtitan.models.qwen3.infra.parallelize as qwen3_parallelize
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division


def parallelize_tied_qwen3(*args: Any, **kwargs: Any) -> nn.Module:
    """Upstream's ``parallelize_qwen3``, with :func:`apply_fsdp_tied` for its FSDP part."""
    upstream: Callable[..., nn.Module] = qwen3_parallelize.parallelize_qwen3
    with mock.patch.object(qwen3_parallelize, "apply_fsdp", apply_fsdp_tied):
        return upstream(*args, **kwargs)


def apply_fsdp_tied(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str = "default",
    **_: Any,
) -> None:
    """Shards a tied, dense model; takes upstream's arguments."""
    if pp_enabled:
        raise ValueError("Tied embeddings cannot be split over pipeline stages.")
    config: dict[str, Any] = {
        "mesh": dp_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "reshard_after_forward": reshard_after_forward_policy != "never",
    }
    if cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()
    for block in model.layers.values():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        fully_shard(block, **config)  # pyright: ignore
    # First and last in the forward: resharding in between would only gather it twice.
    ends = [model.tok_embeddings, model.norm, model.output]
    fully_shard(ends, **(config | {"reshard_after_forward": False}))  # pyright: ignore
    fully_shard(model, **config)
    disable_fsdp_gradient_division(model)
