# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Applies every parallelism except the pipeline's to a model or to one of its stages.

Tensor parallelism (https://arxiv.org/abs/1909.08053) with sequence parallelism
(https://arxiv.org/abs/2205.05198) divides weights as `blocks/parts.py` says for each block. Between
blocks, a rank holds its part of the sequence. Context parallelism uses all-to-all (`packed_attention.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.blocks.experts import MoE
from torchtitan.grpo.models.blocks.parts import Layer, Part
from torchtitan.grpo.models.checkpointing import apply_checkpointing
from torchtitan.grpo.models.decoder import blocks_of, embeds_tokens, tie_again
from torchtitan.grpo.models.fsdp import apply_data_parallel
from torchtitan.grpo.models.lora import add_adapters
from torchtitan.grpo.models.packed_model import PackedModel, ValueHead
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.upstream.parallelism import ParallelDims


def parallelize(
    model: nn.Module,
    dims: ParallelDims,
    config: JobConfig,
    compile_backend: Callable[..., Any] | None = None,
) -> nn.Module:
    """Applies everything but pipelines to a :class:`PackedModel` on the meta device."""
    assert isinstance(model, PackedModel)
    if dims.tp_enabled:
        _divide_tensors(model, dims.get_mesh("tp"))
        if config.parallelism.enable_async_tensor_parallel:
            import torch._inductor.config as inductor_config

            inductor_config._micro_pipeline_tp = True
    if dims.tp_enabled or dims.ep_enabled:
        for block in blocks_of(model):
            if block.moe is not None:
                _divide_experts(block, dims)
    if dims.cp_enabled:
        model.split_context(dims.get_mesh("cp").get_group())
    lora = config.lora
    if lora.rank:
        add_adapters(model, lora, TORCH_DTYPE_MAP[config.training.dtype])
    if config.activation_checkpoint.mode != "none":
        apply_checkpointing(model, config)
    if config.compile.enable:
        _wait_for_embeddings(model)
        _compile(model, compile_backend or config.compile.backend)
    apply_data_parallel(model, dims, config)
    return model


def _divide_tensors(model: PackedModel, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {}
    if embeds_tokens(model):
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if model.norm is not None:
        plan["norm"] = SequenceParallel()
    if isinstance(model.output, ValueHead):
        # Every rank holds its single row, and gets all hidden states.
        distribute_module(model.output, mesh)
        plan["output"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        )
    elif model.output is not None:
        # It returns the same result on all ranks and never exposes its logits.
        plan["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    for block in blocks_of(model):
        # Helix's blocks lack some parts.
        plan = {
            name: style
            for name, style in tensor_plan(block.row).items()
            if _submodule(block, name) is not None
        }
        parallelize_module(block, mesh, plan)
    tie_again(model)


def tensor_plan(layer: Layer) -> dict[str, ParallelStyle]:
    """Returns the tensor-parallel style of each module of a layer, except for its experts."""
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        # One gather serves all products with a block's input.
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(whole, None, None)
        ),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(whole,)
        ),
    }
    for part in layer.parts:
        if (style := _style_of(part)) is not None:
            plan[part.name] = style
    if layer.feed_forward.has_experts:
        plan["ffn_norm"] = SequenceParallel(use_local_output=True)
    return plan


def _style_of(part: Part) -> ParallelStyle | None:
    if part.norms == "hidden":
        return SequenceParallel()
    if part.norms == "heads":
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    if part.is_stacked:
        return None
    if part.cut is None:
        return _Whole()
    return ColwiseParallel() if part.cut == 0 else RowwiseParallel(output_layouts=Shard(1))


class _Whole(ParallelStyle):
    """A style in which a rank holds a module's whole weights and computes all outputs of its own inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


def _submodule(module: nn.Module, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)  # pyright: ignore[reportAssignmentType]
    return module


def _divide_experts(block: Any, dims: ParallelDims) -> None:
    moe: MoE = block.moe
    tensor_mesh, experts_mesh = dims.get_optional_mesh("tp"), dims.get_optional_mesh("ep")
    if tensor_mesh is not None and experts_mesh is None:
        moe.tensor_group = tensor_mesh.get_group()
    if experts_mesh is not None:
        moe.experts.expert_group = experts_mesh.get_group()
    mesh = experts_mesh or tensor_mesh
    assert mesh is not None
    for part in block.row.feed_forward.parts:
        if part.is_stacked:
            name = part.name.rpartition(".")[2]
            assert part.cut is not None
            cut = part.cut if experts_mesh is None else 0
            divided = distribute_tensor(getattr(moe.experts, name), mesh, [Shard(cut)])
            setattr(moe.experts, name, nn.Parameter(divided))


def _wait_for_embeddings(model: PackedModel) -> None:
    """Makes the embedding's output wait for tensor parallelism's asynchronous collective, by a copy.

    If a compiled block received a tensor whose collective is still running, it would compute no
    gradient for that tensor, and the embedding would never be trained.
    """

    def wait(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output.clone() if isinstance(output, AsyncCollectiveTensor) else output

    if embeds_tokens(model):
        model.tok_embeddings.register_forward_hook(wait)  # pyright: ignore


def _compile(model: PackedModel, backend: str | Callable[..., Any]) -> None:
    """Compiles each layer, so that equal layers share code.

    FSDP's hooks on experts, and the varying number of tokens of an expert, would break the graph. In
    layers with experts, only the other modules and the arithmetic between the experts' matrix products
    are compiled.
    """
    for number, block in list(model.layers.items()):
        moe: MoE | None = block.moe  # pyright: ignore[reportAssignmentType]
        if moe is None:
            model.layers[number] = torch.compile(block, backend=backend, fullgraph=True)  # pyright: ignore
            continue
        # A checkpoint passes reads of attributes on, and no assignments.
        inner: Any = getattr(block, "_checkpoint_wrapped_module", block)
        for owner, name in (
            (inner, "attention_norm"),
            (inner, "attention"),
            (inner, "ffn_norm"),
            (moe, "router"),
        ):
            compiled = torch.compile(getattr(owner, name), backend=backend, fullgraph=True)
            setattr(owner, name, compiled)
        moe.experts.gate = torch.compile(moe.experts.gate, backend=backend, dynamic=True)  # pyright: ignore
