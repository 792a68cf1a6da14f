# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Recomputes checkpointed blocks while a stage waits for the gradient of its output.

A checkpointed block is computed again in the backward pass, which begins when the next stage has
sent a gradient. The recomputation needs no gradient, and a rank has nothing else to do while it
waits.

Every block asks for an empty tensor of its own to be saved, as one of the tensors that the
checkpoint drops. Reading this tensor makes torch recompute the block; a backward pass in the same
:class:`torch.utils.checkpoint.GraphExecGroup` then uses what was computed.
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
    """Returns how many blocks of a stage may be recomputed early; -1 for all.

    It is 0 where the setting cannot work: without activation checkpoints, with blocks that contain
    their checkpoint in compiled code, and if parameters are freed after the forward pass, because
    FSDP gathers them again only when a gradient arrives.
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
        num_blocks: How many of its checkpointed blocks, from the last one on; -1 for all. The
            activations of these blocks exist at the same time. The last block alone costs no
            memory, because its activations are the first that the backward pass needs.
    """

    def __init__(self, stage_module: nn.Module, num_blocks: int) -> None:
        blocks = [m for m in stage_module.modules() if isinstance(m, CheckpointWrapper)]
        for block in blocks if num_blocks < 0 else blocks[max(0, len(blocks) - num_blocks) :]:
            block._checkpoint_wrapped_module.register_forward_pre_hook(self._mark)
        self._marks: dict[int, list[Any]] = {}
        self._marking: list[Any] | None = None

    @contextmanager
    def marking(self, microbatch: int) -> Iterator[None]:
        """Makes the forward pass in the block one that can be recomputed early."""
        self._marking = self._marks.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._marking = None

    def recompute(self, microbatch: int) -> GraphExecGroup:
        """Recomputes the blocks; the backward pass must run in the group that is returned."""
        group = GraphExecGroup()
        with group:
            for mark in reversed(self._marks.pop(microbatch)):
                _ = mark.saved_tensors
        return group

    def forget(self) -> None:
        """Drops what is left of the last pass."""
        self._marks.clear()

    def _mark(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Marks the block's first input. A recomputation marks it too, but that mark is not used."""
        if not torch.is_grad_enabled():
            return None
        marks = [] if self._marking is None else self._marking
        return (_Mark.apply(inputs[0], marks), *inputs[1:])


class _Mark(torch.autograd.Function):
    """Passes a tensor on, and saves an empty one."""

    @staticmethod
    def forward(ctx, input, marks):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(torch.empty(0, device=input.device))
        marks.append(ctx)
        return input.view_as(input)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
