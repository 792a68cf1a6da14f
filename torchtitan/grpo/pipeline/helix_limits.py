# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the schedule Helix cannot be combined with. Does not import torch."""

from collections.abc import Iterator
from typing import Any

from torchtitan.grpo.config.job_config import JobConfig

_SETTING = 'parallelism.pipeline_parallel_schedule = "Helix"'


def helix_problems(config: JobConfig) -> Iterator[str]:
    """Yields the reasons why settings rule out the schedule Helix, whatever the model."""
    grpo, lora = config.grpo, config.lora
    mode = config.activation_checkpoint.mode
    if mode not in ("none", "full"):
        yield (
            f"activation_checkpoint.mode must be 'full' or 'none' with {_SETTING}, got {mode!r}: the "
            "schedule recomputes all parts of a layer but attention, or nothing. Set it to 'full'."
        )
    if config.compile.enable:
        yield (
            f"compile.enable must be false with {_SETTING}, got true: the compiler works on whole "
            "layers, which the schedule divides."
        )
    if lora.rank:
        yield (
            f"lora.rank must be 0 with {_SETTING}, got {lora.rank}: gradients of the weights between "
            "adapters would be computed in vain. Choose another schedule."
        )
    if grpo.pipeline_offload != 0:
        yield (
            f"grpo.pipeline_offload must be 0 with {_SETTING}, got {grpo.pipeline_offload:g}: the "
            "schedule keeps tensors of its own, which are not moved to the host."
        )
    if jobs := config.parallelism.pipeline_fill_jobs:  # pyright: ignore[reportAttributeAccessIssue]
        yield (
            f"parallelism.pipeline_fill_jobs must be left out with {_SETTING}, got {jobs}: the "
            "schedule leaves no gaps that are known in advance. Choose another schedule."
        )
    yield from _chunk_problems(config, grpo.pipeline_chunk_tokens)


def _chunk_problems(config: JobConfig, chunk_tokens: int) -> Iterator[str]:
    if chunk_tokens == 0:
        return
    if config.activation_checkpoint.mode == "none":
        yield (
            f"grpo.pipeline_chunk_tokens must be 0 with activation_checkpoint.mode = 'none', got "
            f"{chunk_tokens}: what all chunks keep is as large as without chunks. Use mode = 'full'."
        )
    degree = config.parallelism.tensor_parallel_degree
    if degree > 1:
        yield (
            f"grpo.pipeline_chunk_tokens must be 0 with parallelism.tensor_parallel_degree = {degree}, "
            f"got {chunk_tokens}: ranks hold other tokens of a chunk than of the row."
        )


def helix_model_problems(model_args: Any, path: Any) -> Iterator[str]:
    """Yields the reasons why Helix cannot divide a model with these arguments."""
    if len(model_args.layers.kinds) > 1 and not model_args.has_experts:
        yield (
            f"{_SETTING} needs a model whose layers are of one kind, and {path} has "
            f"{len(model_args.layers.kinds)}. Choose another schedule."
        )
    if model_args.has_experts:
        yield (
            f"{_SETTING} needs a model without experts, and {path} has experts: their loads would be "
            "counted again in each recomputation. Choose another schedule."
        )
