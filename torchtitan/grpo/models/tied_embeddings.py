# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""FSDP2 for models whose output layer shares the embedding's weight.

Upstream shards the embedding and the output layer as two FSDP groups. Torch refuses a
parameter that two groups manage, so Qwen3's small models, which are tied, would not run.
Here the two, with the norm between them, are one group.
"""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division


def tie_again(model: nn.Module) -> None:
    """Ties the two ends once more: tensor parallelism made two shards out of one weight."""
    if getattr(model, "enable_weight_tying", False):
        model.output.weight = model.tok_embeddings.weight  # pyright: ignore


def apply_fsdp_tied(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    reshard_after_forward_policy: str = "default",
) -> None:
    """Shards a tied, dense model; takes upstream's arguments."""
    if pp_enabled:
        raise ValueError("Tied embeddings cannot be split over pipeline stages.")
    config: dict[str, Any] = {
        "mesh": dp_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "reshard_after_forward": reshard_after_forward_policy != "never",
    }
    for block in model.layers.values():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        fully_shard(block, **config)  # pyright: ignore
    # First and last in the forward: resharding in between would only gather it twice.
    ends = [model.tok_embeddings, model.norm, model.output]
    fully_shard(ends, **(config | {"reshard_after_forward": False}))  # pyright: ignore
    fully_shard(model, **config)
    disable_fsdp_gradient_division(model)
