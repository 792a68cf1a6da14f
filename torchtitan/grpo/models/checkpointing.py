# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Activation checkpointing as ``[activation_checkpoint]`` sets it: what the backward pass computes again."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn as nn
import torch.utils.checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.system.logs import logger

_mm, _to_copy = torch.ops.aten.mm.default, torch.ops.aten._to_copy.default
_higher_order: Any = torch._higher_order_ops  # pyright: ignore[reportAttributeAccessIssue]
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention",
              "flash_attention_for_cpu", "fused_attention_overrideable")  # fmt: skip


def saved_operations() -> set[Any]:
    """Returns the operations whose results checkpointing by operation keeps. (Of ``mm``, it keeps half.)"""
    # Registers its operation. Not above: it imports the compiler.
    import torch.nn.attention.varlen

    aten, ours = torch.ops.aten, torch.ops.torchtitan_grpo
    return {
        _mm,
        *(getattr(aten, f"_scaled_dot_product_{name}").default for name in _ATTENTION),
        torch.ops.torch_attn._varlen_attn.default,
        ours.attend_to_tree.default,
        _higher_order.flex_attention,
        _higher_order.inductor_compiled_code,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }


def apply_checkpointing(model: nn.Module, config: JobConfig) -> None:
    """Wraps the layers of a decoder or pipeline stage. Call it before anything shards them."""
    settings = config.activation_checkpoint
    # With a second microbatch, dynamo may compile a block again for changing shapes and would prefer
    # that code, whose results do not fit those that the first forward pass kept
    # (https://github.com/pytorch/pytorch/issues/166926).
    torch._C._dynamo.eval_frame._set_lru_cache(False)  # pyright: ignore[reportAttributeAccessIssue]
    _ignore_profiler_marks()
    if settings.mode == "memory_budget":
        functorch_config.activation_memory_budget = settings.memory_budget
        return
    layers: Any = model.layers
    for number, block in list(layers.items()):
        options: dict[str, Any] = {}
        if settings.mode == "selective" and settings.selective_ac_option == "op":
            # A router's product is small, and would change which of the others are kept.
            shapes = {
                torch.Size(reversed(module.weight.shape))
                for name, module in block.named_modules()
                if name.endswith("router.gate") and isinstance(module, nn.Linear)
            }
            options["context_fn"] = _selective_contexts(saved_operations(), shapes)
        elif settings.mode == "selective":
            every = max(int(settings.selective_ac_option), 1)
            if (int(number) + 1) % every:
                continue
        keeps_rng = settings.preserve_rng_state
        layers[number] = checkpoint_wrapper(
            block, preserve_rng_state=keeps_rng, early_stop=False, **options
        )
    logger.info(f"Activation checkpointing: {settings.mode}")


def _ignore_profiler_marks() -> None:
    """Makes selective checkpointing ignore profiler marks.

    FSDP's hooks record other marks during recomputation than in the forward pass. Torch would refuse that.
    """
    ops = torch.ops.profiler
    torch.utils.checkpoint.SAC_IGNORED_OPS |= {
        ops._record_function_enter_new.default,
        ops._record_function_exit.default,
        ops._record_function_exit._RecordFunction,
    }


def _selective_contexts(saved: set[Any], recomputed: set[torch.Size]) -> Callable[[], Any]:
    """Returns the function for checkpoint's ``context_fn`` that keeps results of ``saved`` operations.

    It is a closure because the compiler would look into the arguments of a partial function.
    """

    def contexts() -> Any:
        counts = Counter[bool]()

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op == _to_copy and args[0].is_cuda and str(kwargs.get("device")) == "cpu":
                return CheckpointPolicy.MUST_SAVE  # the host would wait a second time
            is_saved = op in saved
            if op == _mm:
                if args[1].shape in recomputed:
                    return CheckpointPolicy.PREFER_RECOMPUTE
                counts[ctx.is_recompute] += 1
                is_saved = counts[ctx.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)

    return contexts
