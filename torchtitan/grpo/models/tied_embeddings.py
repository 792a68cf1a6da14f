# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""FSDP2 for models whose output layer shares the embedding's weight.

Upstream shards the embedding and the output layer as two FSDP groups. Torch does not allow a
parameter in two groups, so that Qwen3's small models, which are tied, would not run. Here both
layers, together with the final norm, form one group.
"""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division


def tie_again(model: nn.Module) -> None:
    """Ties the output layer to the embedding again.

    Tensor parallelism replaces the shared weight with two separate shards.
    """
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
    """Applies FSDP2 to a tied, dense model. The arguments are those of upstream's ``apply_fsdp``.

    Raises:
        ValueError: If ``pp_enabled`` is True.
    """
    if pp_enabled:
        raise ValueError(
            "A model with tied embeddings cannot be split over pipeline stages: the first and the "
            "last stage would share a weight. Set parallelism.pipeline_parallel_degree = 1."
        )
    config: dict[str, Any] = {
        "mesh": dp_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "reshard_after_forward": reshard_after_forward_policy != "never",
    }
    for block in model.layers.values():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        fully_shard(block, **config)  # pyright: ignore
    # The group is used first and last in a forward pass. Resharding it in between would only
    # gather it twice.
    ends = [model.tok_embeddings, model.norm, model.output]
    fully_shard(ends, **(config | {"reshard_after_forward": False}))  # pyright: ignore
    fully_shard(model, **config)
    disable_fsdp_gradient_division(model)
