# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Models whose output layer shares the embedding's weight, whole or in pipeline stages.

FSDP2: upstream shards the embedding and the output layer as two groups, and torch does not allow a
parameter in two groups. Here both layers, together with the final norm, form one group.

Pipelines: the first and the last stage both need the weight, and each holds a copy. In the last
stage it belongs to an embedding that embeds nothing, as in a whole model, so that both copies have
the same name in pushes, exports and checkpoints. `training/gradient_norm.py` keeps them equal.
"""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan.grpo.system.device import disable_fsdp_gradient_division


class OutputEmbedding(nn.Embedding):
    """Holds the weight of the last stage's output layer under the embedding's name."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the hidden states of the previous stage as they are."""
        return hidden


def is_tied(model: nn.Module) -> bool:
    """Returns whether the whole model, of which this may be a stage, has tied embeddings."""
    return bool(getattr(model, "enable_weight_tying", False))


def embeds_tokens(model: nn.Module) -> bool:
    """Returns whether the model, or this stage of it, takes tokens and not hidden states."""
    embeddings = model.tok_embeddings
    return embeddings is not None and not isinstance(embeddings, OutputEmbedding)


def hold_output_embedding(stage: nn.Module) -> None:
    """Makes the last stage of a tied model the holder of the weight. It is on the meta device."""
    output: Any = stage.output
    vocab, dim = output.weight.shape
    stage.tok_embeddings = OutputEmbedding(vocab, dim, _weight=output.weight)
    stage.tok_embeddings.weight = output.weight


def tie_again(model: nn.Module) -> None:
    """Ties output layer and embedding again, if this stage has both.

    Tensor parallelism replaces the shared weight with two separate shards.
    """
    embeddings: Any = model.tok_embeddings
    output: Any = model.output
    if not is_tied(model) or embeddings is None or output is None:
        return
    if isinstance(embeddings, OutputEmbedding):  # which was not sharded
        embeddings.weight = output.weight
    else:
        output.weight = embeddings.weight


def apply_fsdp_tied(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    reshard_after_forward_policy: str = "default",
) -> None:
    """Applies FSDP2 to a tied, dense model or to a stage of one.

    The arguments are those of upstream's ``apply_fsdp``.
    """
    reshards = {"always": True, "never": False, "default": not pp_enabled}
    config: dict[str, Any] = {
        "mesh": dp_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "reshard_after_forward": reshards[reshard_after_forward_policy],
    }
    for block in model.layers.values():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        fully_shard(block, **config)  # pyright: ignore
    # The group is used first and last in a forward pass. Resharding it in between would only
    # gather it twice.
    ends = [m for m in (model.tok_embeddings, model.norm, model.output) if m is not None]
    if ends:
        fully_shard(ends, **(config | {"reshard_after_forward": False}))  # pyright: ignore
    fully_shard(model, **config)
    disable_fsdp_gradient_division(model)
