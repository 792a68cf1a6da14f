# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Data parallelism by FSDP2: shards, replicas, and what is kept between microbatches.

Gradients are summed, not averaged: the loss is divided by the tokens of all ranks.
"""

from itertools import pairwise
from typing import Any, Literal, get_args

import torch
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.decoder import blocks_of, is_tied
from torchtitan.grpo.models.packed_model import PackedModel, ValueHead
from torchtitan.grpo.system.device import (
    TORCH_DTYPE_MAP,
    disable_fsdp_gradient_division,
    prepare_fsdp_for_gloo,
)
from torchtitan.grpo.upstream.parallelism import ParallelDims, replicas_mesh, utils


def apply_data_parallel(model: PackedModel, dims: ParallelDims, config: JobConfig) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_reduce],
    )
    if dims.fsdp_enabled:
        _shard(model, dims, config, policy)
    elif dims.dp_replicate_enabled or _is_mixed(config):
        # Even on one rank, FSDP2 casts for mixed precision. Autocast would leave the output
        # layer in float32.
        _replicate(model, replicas_mesh(dims), policy)
    if utils.device_type == "cpu":
        prepare_fsdp_for_gloo(model)


def _shard(
    model: PackedModel, dims: ParallelDims, config: JobConfig, policy: MixedPrecisionPolicy
) -> None:
    replicas = ["dp_replicate"] if dims.dp_replicate_enabled else []
    reshards = {"always": True, "never": False, "default": not dims.pp_enabled}[
        _reshard_policy(config)
    ]
    settings: dict[str, Any] = {
        "mesh": dims.get_mesh([*replicas, "fsdp"]),
        "mp_policy": policy,
        "reshard_after_forward": reshards,
    }
    blocks, ends = blocks_of(model), _ends(model)
    if isinstance(model.output, ValueHead):
        # It is no part of a group that is cast. The last norm is the root's then.
        fully_shard(
            model.output,
            mesh=settings["mesh"],
            mp_policy=_in_float32(),
            reshard_after_forward=False,
        )
    if model.tok_embeddings is not None and not is_tied(model):
        fully_shard(model.tok_embeddings, **settings)
    for block in blocks:
        if dims.ep_enabled and block.moe is not None:
            experts_mesh = dims.get_mesh([*replicas, "efsdp"])
            fully_shard(block.moe.experts, **settings | _of_experts(block, dims, experts_mesh))
        fully_shard(block, **settings)
    if ends:
        # They are used last, or, if tied, first and last in a forward pass: what is freed would be
        # gathered again at once.
        keeps = is_tied(model) or _reshard_policy(config) != "always"
        fully_shard(ends, **settings | {"reshard_after_forward": not keeps})  # pyright: ignore
    fully_shard(model, mesh=settings["mesh"], mp_policy=policy)
    disable_fsdp_gradient_division(model)
    if dims.ep_enabled:
        _prefetch(model, blocks)


def _ends(model: PackedModel) -> list[nn.Module]:
    """Returns modules outside of the layers that form one FSDP group, such as those that share a weight."""
    if is_tied(model):
        return [m for m in (model.tok_embeddings, model.norm, model.output) if m is not None]
    has_both = model.norm is not None and model.output is not None
    if not has_both or isinstance(model.output, ValueHead):
        return []
    return [model.norm, model.output]  # pyright: ignore[reportReturnType]


def _of_experts(block: Any, dims: ParallelDims, mesh: DeviceMesh) -> dict[str, Any]:
    """Returns FSDP2's options for experts: which mesh, and dimension 1 if there are too few experts."""
    options: dict[str, Any] = {"mesh": mesh}
    if mesh["efsdp"].size() * dims.ep > block.moe.experts.num_experts:
        options["shard_placement_fn"] = lambda _: Shard(1)
    return options


def _prefetch(model: PackedModel, blocks: list[Any]) -> None:
    """Tells FSDP2 which groups to prefetch. It would prefetch too late where the host waits for experts."""
    groups: list[list[Any]] = [[b, b.moe.experts] if b.moe is not None else [b] for b in blocks]
    last: list[Any] = _ends(model)
    first: list[Any] = [m for m in [model.tok_embeddings] if isinstance(m, FSDPModule)]
    for group, after in pairwise(group for group in [first, *groups, last] if group):
        group[0].set_modules_to_forward_prefetch(after)
    for group, after in pairwise(group for group in [last[-1:], *groups[::-1], first] if group):
        group[0].set_modules_to_backward_prefetch(after)


def _in_float32() -> MixedPrecisionPolicy:
    """Returns a float32 ``MixedPrecisionPolicy`` for a value head, which casts its hidden states itself."""
    return MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _reshard_policy(config: JobConfig) -> str:
    settings = config.parallelism
    kept: str = settings.fsdp_between_microbatches  # pyright: ignore[reportAttributeAccessIssue]
    return "never" if keeps_parameters(kept) else settings.fsdp_reshard_after_forward


def _is_mixed(config: JobConfig) -> bool:
    lora = config.lora
    kept = {config.training.dtype}
    if lora.rank and lora.base_dtype != "training":
        kept.add(lora.base_dtype)
    return kept != {config.training.mixed_precision_param}


def _replicate(model: PackedModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Replicates a model with FSDP2's ``replicate``.

    DDP would average gradients, and does not support pipeline or tensor parallelism.
    """
    for block in blocks_of(model):
        replicate(block, mesh=mesh, mp_policy=policy)
    if isinstance(model.output, ValueHead):
        replicate(model.output, mesh=mesh, mp_policy=_in_float32())
    replicate(model, mesh=mesh, mp_policy=policy)
    # On one rank, FSDP2 would divide by 1 what nothing divides, in a pass over all gradients.
    if mesh.size() > 1:
        disable_fsdp_gradient_division(model)


Kept = Literal["free", "keep_parameters", "keep_all"]
"""Values of ``parallelism.fsdp_between_microbatches`` other than ``auto``."""


def keeps_parameters(kept: str) -> bool:
    return kept in ("keep_parameters", "keep_all")


class BetweenMicrobatches:
    """Tells FSDP2, if it is applied, what to keep between microbatches.

    By default FSDP2 gathers and casts parameters and reduces gradients for each microbatch.
    ``set_is_last_backward`` is not used: it would only delay the wait for reductions, and let FSDP2
    prefetch the last parameters of the previous microbatch after each backward pass.
    """

    def __init__(self, model: nn.Module, kept: Kept) -> None:
        assert kept in get_args(Kept), f"{kept!r} is not resolved"
        self._root = model if isinstance(model, FSDPModule) else None
        self._sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.keeps_parameters = keeps_parameters(kept)
        self._keeps_gradients = kept == "keep_all"
        if self._root is not None:
            self._root.set_reshard_after_backward(not self.keeps_parameters)

    def before_backward(self, *, is_last: bool) -> None:
        """Sets whether the next backward pass reduces the gradients that were summed since the last reduction."""
        if self._root is None:
            return
        if self._keeps_gradients:
            self._root.set_requires_gradient_sync(is_last)
        else:
            # Sums that replicas have not exchanged yet take no more memory than exchanged ones.
            self._root.set_requires_all_reduce(is_last)

    def forget_parameters(self) -> None:
        """Frees gathered parameters, which the next optimizer step makes outdated."""
        for module in self._sharded:
            module.reshard()
