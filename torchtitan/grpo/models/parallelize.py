# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Applies every parallelism except the pipeline's to a model or to one of its stages.

Unlike upstream, context parallelism uses all-to-all, tied embeddings form one FSDP group, plain
replication sums gradients instead of averaging them, and tensor parallelism accepts the
positions of packed rows.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
import torch.nn as nn
import torch.utils.checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

from torchtitan.grpo.config import LoRA
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.decoder import (
    apply_fsdp_tied,
    embeds_tokens,
    is_tied,
    tie_again,
)
from torchtitan.grpo.models.lora import add_adapters
from torchtitan.grpo.models.moe import sum_moe_gradients
from torchtitan.grpo.models.packed_model import PackedModel, ValueHead
from torchtitan.grpo.system.device import disable_fsdp_gradient_division, prepare_fsdp_for_gloo
from torchtitan.grpo.system.dtypes import TORCH_DTYPE_MAP
from torchtitan.grpo.upstream.models import (
    apply_ac,
    apply_compile,
    apply_fsdp,
    apply_moe_ep_tp,
    apply_tp,
    op_sac_save_list,
)
from torchtitan.grpo.upstream.parallelism import ParallelDims
from torchtitan.grpo.upstream.tools import utils


def parallelize(
    model: nn.Module,
    dims: ParallelDims,
    config: JobConfig,
    compile_backend: Callable[..., Any] | None = None,
) -> nn.Module:
    """Applies everything but pipelines to a :class:`PackedModel` on the meta device."""
    assert isinstance(model, PackedModel)
    if dims.tp_enabled or dims.ep_enabled:
        _apply_tensor_and_expert(model, dims, config)
    if dims.cp_enabled:
        PackedModel.split_context(model, dims.get_mesh("cp").get_group())
    lora: LoRA = config.lora  # pyright: ignore[reportAttributeAccessIssue]
    if lora.rank:
        add_adapters(model, lora, TORCH_DTYPE_MAP[config.training.dtype])
    compiled = config.compiles_model
    if config.activation_checkpoint.mode != "none":
        _checkpoint_no_profiler_marks()
        apply_ac(
            model,
            config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=op_sac_save_list | {torch.ops.torchtitan_grpo.attend_to_tree.default},  # pyright: ignore
            base_folder=config.job.dump_folder,
        )
    if compiled:
        _wait_for_embeddings(model)
        settings = config.compile
        if compile_backend is not None:
            settings = replace(settings, backend=compile_backend)  # pyright: ignore
        apply_compile(model, settings, dims.ep_enabled)
    _apply_data_parallel(model, dims, config)
    return model


def _checkpoint_no_profiler_marks() -> None:
    """In selective recomputation FSDP's hooks record other profiler marks than in the forward pass,
    which torch refuses unless told to ignore them.
    """
    ops = torch.ops.profiler
    torch.utils.checkpoint.SAC_IGNORED_OPS |= {
        ops._record_function_enter_new.default,
        ops._record_function_exit.default,
        ops._record_function_exit._RecordFunction,
    }


def _wait_for_embeddings(model: PackedModel) -> None:
    """Copies the embedding's output, which waits for the collective of tensor parallelism.

    For the unfinished tensor, a compiled block would compute no gradient, and the embedding would
    never be trained.
    """

    def wait(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output.clone() if isinstance(output, AsyncCollectiveTensor) else output

    if embeds_tokens(model):
        model.tok_embeddings.register_forward_hook(wait)  # pyright: ignore


def _apply_tensor_and_expert(model: PackedModel, dims: ParallelDims, config: JobConfig) -> None:
    if dims.tp_enabled:
        embeddings, head = model.tok_embeddings, model.output
        if not embeds_tokens(model):
            # A stage that takes hidden states has nothing to shard here.
            model.tok_embeddings = None  # pyright: ignore[reportArgumentType]
        if isinstance(head, ValueHead):
            model.output = None  # pyright: ignore[reportArgumentType]  (its single row stays whole)
        with warnings.catch_warnings():
            # Upstream's plan shards the norms of queries and keys, which only some families have.
            warnings.filterwarnings("ignore", "Parallelize plan key '([qk]_norm|output)'")
            apply_tp(
                model,
                dims.get_mesh("tp"),
                # The output layer returns the same result on all ranks and never exposes its logits.
                loss_parallel=False,
                enable_float8_tensorwise_tp=False,
                enable_async_tp=config.parallelism.enable_async_tensor_parallel,
                cp_enabled=True,  # upstream accepts positions only so
            )
        model.tok_embeddings, model.output = embeddings, head
        if isinstance(head, ValueHead):
            _replicate_head(head, dims.get_mesh("tp"))
        tie_again(model)
    apply_moe_ep_tp(
        model,
        tp_mesh=dims.get_optional_mesh("tp"),
        ep_mesh=dims.get_optional_mesh("ep"),
        etp_mesh=dims.get_optional_mesh("etp"),
        ep_etp_mesh=dims.get_optional_mesh(["ep", "etp"]),
    )
    if dims.tp_enabled:
        sum_moe_gradients(
            model, dims.get_mesh("tp"), splits_tokens=dims.ep_enabled and not dims.etp_enabled
        )


def _replicate_head(head: ValueHead, mesh: DeviceMesh) -> None:
    """Gives every rank the whole weight and all hidden states, which the last norm leaves sharded."""
    distribute_module(head, mesh)
    whole = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    )
    parallelize_module(head, mesh, whole)


def _apply_data_parallel(model: PackedModel, dims: ParallelDims, config: JobConfig) -> None:
    dtypes = {
        "param_dtype": TORCH_DTYPE_MAP[config.training.mixed_precision_param],
        "reduce_dtype": TORCH_DTYPE_MAP[config.training.mixed_precision_reduce],
    }
    if dims.fsdp_enabled:
        replicas = ["dp_replicate"] if dims.dp_replicate_enabled else []
        sharing: dict[str, Any] = {
            "dp_mesh": dims.get_mesh([*replicas, "fsdp"]),
            "pp_enabled": dims.pp_enabled,
            "reshard_after_forward_policy": _reshard_policy(config),
        }
        edp_mesh = dims.get_optional_mesh([*replicas, "efsdp"])
        if is_tied(model):
            apply_fsdp_tied(model, **dtypes, **sharing)
        elif isinstance(head := model.output, ValueHead):
            fully_shard(
                head,
                mesh=sharing["dp_mesh"],
                mp_policy=_in_float32(),
                reshard_after_forward=False,
            )
            # Upstream would add the head to a group that is cast. The last norm is the root's then.
            model.output = None  # pyright: ignore[reportArgumentType]
            apply_fsdp(model, **dtypes, **sharing, ep_degree=dims.ep, edp_mesh=edp_mesh)
            model.output = head
            disable_fsdp_gradient_division(model)
        else:
            apply_fsdp(model, **dtypes, **sharing, ep_degree=dims.ep, edp_mesh=edp_mesh)
    elif dims.dp_replicate_enabled or _is_mixed(config):
        # Even on one rank, FSDP2 casts for mixed precision. Upstream's autocast would leave the
        # output layer in float32.
        mesh = dims.get_optional_mesh("dp_replicate") or dims._meshes["dp_replicate"]
        _apply_replication(model, mesh, **dtypes)
    if utils.device_type == "cpu":
        prepare_fsdp_for_gloo(model)


def _in_float32() -> MixedPrecisionPolicy:
    """For a value head, which casts the hidden states of scored tokens itself."""
    return MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _reshard_policy(config: JobConfig) -> str:
    settings = config.parallelism
    kept: str = settings.fsdp_between_microbatches  # pyright: ignore[reportAttributeAccessIssue]
    return "never" if keeps_parameters(kept) else settings.fsdp_reshard_after_forward


def _is_mixed(config: JobConfig) -> bool:
    lora: LoRA = config.lora  # pyright: ignore[reportAttributeAccessIssue]
    kept = {config.training.dtype}
    if lora.rank and lora.base_dtype != "training":
        kept.add(lora.base_dtype)
    return kept != {config.training.mixed_precision_param}


def _apply_replication(
    model: PackedModel, mesh: DeviceMesh, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    """Upstream's DDP averages gradients, and supports neither pipeline nor tensor parallelism."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in cast(nn.ModuleDict, model.layers).values():
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

    By default it gathers and casts parameters and reduces gradients for each microbatch.
    ``set_is_last_backward`` stays: it would only delay the wait for reductions, and let FSDP2
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
        """Sets whether the next backward pass reduces all gradients since the last reduction."""
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
