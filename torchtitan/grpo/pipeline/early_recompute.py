# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Recomputes checkpointed blocks while a stage waits for the gradient of its output.

A checkpointed block is recomputed in the backward pass, which begins when the next stage has sent a
gradient. The recomputation needs no gradient, and the rank is otherwise idle while it waits.

Every block saves an empty tensor of its own for the backward pass. The checkpoint drops this tensor
like all other saved tensors. Reading it makes torch recompute the block. A backward pass in the same
:class:`torch.utils.checkpoint.GraphExecGroup` then uses the recomputed tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import GraphExecGroup

from torchtitan.grpo.job_config import JobConfig


def num_early_blocks(config: JobConfig) -> int:
    """Returns how many blocks of a stage may be recomputed early; -1 means all blocks.

    The result is 0 where early recomputation is impossible: without activation checkpointing, if the
    checkpoints are part of compiled code, and if parameters are freed after the forward pass. In the
    last case, FSDP gathers the parameters again only when a gradient arrives.
    """
    is_compiled = config.compile.enable and "model" in config.compile.components
    is_checkpointed = config.activation_checkpoint.mode in ("full", "selective")
    frees_parameters = config.parallelism.fsdp_reshard_after_forward == "always"
    if is_compiled or not is_checkpointed or frees_parameters:
        return 0
    return config.grpo.recompute_early_blocks


class EarlyRecompute:
    """The checkpointed blocks of one stage that can be recomputed early.

    Args:
        stage_module: Module of the stage, parallelized.
        num_blocks: Number of checkpointed blocks, counted from the last one; -1 means all blocks.
            The activations of these blocks exist at the same time. Recomputing only the last block
            takes no additional memory, because its activations are the first ones that the backward
            pass needs.
    """

    def __init__(self, stage_module: nn.Module, num_blocks: int) -> None:
        blocks = [m for m in stage_module.modules() if isinstance(m, CheckpointWrapper)]
        for block in blocks if num_blocks < 0 else blocks[max(0, len(blocks) - num_blocks) :]:
            block._checkpoint_wrapped_module.register_forward_pre_hook(self._mark)
        self._marks: dict[int, list[Any]] = {}
        self._marking: list[Any] | None = None

    @contextmanager
    def marking(self, microbatch: int) -> Iterator[None]:
        """Marks the forward pass in the context, so that it can be recomputed early."""
        self._marking = self._marks.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._marking = None

    def recompute(self, microbatch: int) -> GraphExecGroup:
        """Recomputes the blocks.

        The backward pass must run in the group that is returned.
        """
        group = GraphExecGroup()
        with group:
            for mark in reversed(self._marks.pop(microbatch)):
                _ = mark.saved_tensors
        return group

    def forget(self) -> None:
        """Drops the remaining marks of the last pass."""
        self._marks.clear()

    def _mark(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Marks the block's first input. A recomputation also marks it, but this mark is not used."""
        if not torch.is_grad_enabled():
            return None
        marks = [] if self._marking is None else self._marking
        return (_Mark.apply(inputs[0], marks), *inputs[1:])


class _Mark(torch.autograd.Function):
    """Passes a tensor through and saves an empty tensor for the backward pass."""

    @staticmethod
    def forward(ctx, input, marks):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(torch.empty(0, device=input.device))
        marks.append(ctx)
        return input.view_as(input)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
