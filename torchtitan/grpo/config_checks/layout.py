# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the layout of ranks, ``[parallelism]``."""

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchtitan.grpo.config.frame import Parallelism
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.blocks.parts import GatedFeedForward, RoutedExperts
from torchtitan.grpo.pipeline.helix_limits import helix_model_problems, helix_problems
from torchtitan.grpo.pipeline.schedules import HELIX, SCHEDULES
from torchtitan.grpo.pipeline.stages import stage_modules

if TYPE_CHECKING:
    from torchtitan.grpo.models.hf_config import HFModel


def layout_problems(config: JobConfig) -> Iterator[str]:
    """Yields problems of ``[parallelism]`` that can be found without the model."""
    yield from _degree_problems(config.parallelism)
    settings, training = config.parallelism, config.training
    parts = settings.tensor_parallel_degree * settings.context_parallel_degree
    if training.seq_len % parts:
        yield (
            f"training.seq_len ({training.seq_len}) must be a multiple of parallelism."
            f"tensor_parallel_degree * parallelism.context_parallel_degree ({parts}), because each "
            "rank holds an equal part of a row."
        )
    if settings.enable_async_tensor_parallel and not config.compile.enable:
        yield "parallelism.enable_async_tensor_parallel needs compile.enable = true."
    yield from _between_microbatches_problems(settings)
    yield from _checkpoint_problems(config)
    if settings.pipeline_parallel_degree > 1:
        yield from _pipeline_problems(config)


def _degree_problems(settings: Parallelism) -> Iterator[str]:
    degrees = {
        "data_parallel_replicate_degree": settings.data_parallel_replicate_degree,
        "context_parallel_degree": settings.context_parallel_degree,
        "tensor_parallel_degree": settings.tensor_parallel_degree,
        "pipeline_parallel_degree": settings.pipeline_parallel_degree,
    }  # Expert parallelism adds no ranks.
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    product, shard = math.prod(degrees.values()), settings.data_parallel_shard_degree
    above = [f"parallelism.{key} ({degree})" for key, degree in degrees.items() if degree > 1]
    if shard == -1 and world_size % product:
        yield f"The number of ranks, {world_size}, must be a multiple of {' * '.join(above)}."
    elif shard != -1 and (shard < 1 or shard * product != world_size):
        above.insert(0, f"parallelism.data_parallel_shard_degree ({shard})")
        yield (
            f"{' * '.join(above)} must be the number of ranks, {world_size}. Start as many ranks, or "
            "set parallelism.data_parallel_shard_degree = -1, which takes all remaining ranks."
        )
    elif settings.expert_parallel_degree > 1:
        shard = world_size // product if shard == -1 else shard
        yield from _expert_degree_problems(settings, shard)


def _expert_degree_problems(settings: Parallelism, shard: int) -> Iterator[str]:
    """Yields a problem if the expert-parallel degree does not divide the ranks that experts can use."""
    experts, tensor = settings.expert_parallel_degree, settings.tensor_parallel_degree
    if (lent := shard * settings.context_parallel_degree * tensor) % experts:
        yield (
            f"parallelism.expert_parallel_degree ({experts}) must divide the number of ranks that "
            "experts can use, parallelism.data_parallel_shard_degree * parallelism."
            f"context_parallel_degree * parallelism.tensor_parallel_degree = {lent}."
        )


def _between_microbatches_problems(settings: Parallelism) -> Iterator[str]:
    kept: str = settings.fsdp_between_microbatches  # pyright: ignore[reportAttributeAccessIssue]
    frees = settings.fsdp_reshard_after_forward == "always"
    if kept.startswith("keep_") and frees:
        yield (
            f"parallelism.fsdp_between_microbatches = {kept!r} keeps the parameters that "
            "parallelism.fsdp_reshard_after_forward = 'always' frees. Leave one of them out."
        )
    elif (
        settings.pipeline_parallel_degree > 1 and kept in ("free", "keep_parameters") and not frees
    ):
        yield (
            "parallelism.fsdp_between_microbatches must be 'auto' or 'keep_all' with a pipeline, "
            f"got {kept!r}: pipelines gather parameters and reduce gradients once a step. To free "
            "parameters after each forward pass, set parallelism.fsdp_reshard_after_forward = 'always'."
        )


def _pipeline_problems(config: JobConfig) -> Iterator[str]:
    settings, rows = config.parallelism, config.training.local_batch_size
    size = settings.pipeline_parallel_microbatch_size
    schedule = SCHEDULES.get(settings.pipeline_parallel_schedule)
    if schedule is None:
        yield (
            f"parallelism.pipeline_parallel_schedule must be one of {', '.join(SCHEDULES)}, got "
            f"{settings.pipeline_parallel_schedule!r}."
        )
        return
    if size < 1 or rows % size:
        yield (
            f"training.local_batch_size ({rows}) must be a multiple of parallelism."
            f"pipeline_parallel_microbatch_size ({size}): a pipeline cuts that many rows into "
            "microbatches of this size."
        )
        return
    if schedule.divides_layers:
        yield from helix_problems(config)
    backend = config.compile.backend
    if schedule.is_zero_bubble and config.compile.enable and backend != "inductor":
        yield (
            "compile.backend must be 'inductor' with parallelism.pipeline_parallel_schedule = "
            f"{schedule.name!r}, got {backend!r}: the schedule computes weight gradients later "
            "than those of the inputs, and only inductor's graphs can be cut in this way."
        )
    share = config.grpo.pipeline_offload  # pyright: ignore[reportAttributeAccessIssue]
    if share != 0 and config.compile.enable:
        yield (
            f"grpo.pipeline_offload must be 0 with compile.enable, got {share:g}: tensors that a "
            "compiled block saves are not moved. Use 0, or compile.enable = false."
        )


def check_fill_jobs(config: JobConfig) -> None:
    """Loads the functions in ``parallelism.pipeline_fill_jobs``; ValueError if one cannot be used as a job."""
    paths: list[str] = config.parallelism.pipeline_fill_jobs  # pyright: ignore[reportAttributeAccessIssue]
    if not paths:
        return
    # Imported here, because torch takes seconds.
    from torchtitan.grpo.pipeline.fill_jobs import load_job

    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(
                f"parallelism.pipeline_fill_jobs must name each function once, got {path!r} "
                f"{paths.count(path)} times."
            )
        load_job(path)


def _checkpoint_problems(config: JobConfig) -> Iterator[str]:
    checkpoint = config.activation_checkpoint
    option = checkpoint.selective_ac_option
    if checkpoint.mode == "selective" and option != "op" and not option.isdigit():
        yield (
            "activation_checkpoint.selective_ac_option must be 'op' or a number of layers, got "
            f"{option!r}."
        )
    if checkpoint.mode == "memory_budget" and not config.compile.enable:
        yield (
            "activation_checkpoint.mode = 'memory_budget' is a feature of the compiler and needs "
            "compile.enable = true."
        )
    if checkpoint.mode == "memory_budget" and not 0 <= checkpoint.memory_budget <= 1:
        yield (
            "activation_checkpoint.memory_budget must be between 0 (everything is computed again) and "
            f"1 (nothing is), got {checkpoint.memory_budget:g}."
        )


def model_layout_problems(config: JobConfig, model: "HFModel") -> Iterator[str]:
    settings, args = config.parallelism, model.model_args
    tensor, context = settings.tensor_parallel_degree, settings.context_parallel_degree
    for row in dict.fromkeys(kind.attention for kind in args.layers.kinds):
        heads, kv_heads = row.divided_heads
        if heads % tensor or kv_heads % tensor:
            yield (
                f"parallelism.tensor_parallel_degree ({tensor}) must divide the model's {heads} "
                f"attention heads and {kv_heads} key-value heads ({model.path})."
            )
            return
        local_heads, local_kv_heads = heads // tensor, kv_heads // tensor
        if local_heads % math.lcm(local_kv_heads, context):
            yield (
                f"parallelism.context_parallel_degree ({context}) must divide the {local_heads} "
                f"attention heads that each tensor-parallel rank has, in groups that share a "
                f"key-value head (of {local_kv_heads})."
            )
    rows = dict.fromkeys(kind.feed_forward for kind in args.layers.kinds)
    for width in (row.hidden for row in rows if isinstance(row, GatedFeedForward)):
        if width % tensor:
            yield (
                f"parallelism.tensor_parallel_degree ({tensor}) must divide the width of the model's "
                f"feed-forward layers, {width} ({model.path})."
            )
    if settings.pipeline_parallel_degree > 1:
        try:
            stage_modules(settings, args.n_layers)
        except ValueError as error:
            yield (
                f"The model ({model.path}) cannot be cut into the stages of parallelism.pipeline_"
                f"parallel_degree = {settings.pipeline_parallel_degree} under "
                f"{settings.pipeline_parallel_schedule}: {error}"
            )
        if settings.pipeline_parallel_schedule == HELIX:
            yield from helix_model_problems(args, model.path)
    yield from _compiled_checkpoint_problems(config, model)
    yield from _expert_problems(config, model)


def _compiled_checkpoint_problems(config: JobConfig, model: "HFModel") -> Iterator[str]:
    """Yields problems of activation checkpoints inside compiled blocks, which only dense models have."""
    degree, mode = config.parallelism.tensor_parallel_degree, config.activation_checkpoint.mode
    is_dense = not model.model_args.has_experts
    is_checkpointed = mode in ("full", "selective")
    if degree > 1 and is_dense and is_checkpointed and config.compile.enable:
        yield (
            "activation_checkpoint.mode must be 'none' or 'memory_budget' with compile.enable and "
            f"parallelism.tensor_parallel_degree = {degree}, got {mode!r}: torch fails when it "
            "compiles a checkpoint of sharded tensors, because it tries to save a device mesh. Use "
            "one of these modes, or compile.enable = false."
        )


def _expert_problems(config: JobConfig, model: "HFModel") -> Iterator[str]:
    settings, args = config.parallelism, model.model_args
    experts = settings.expert_parallel_degree
    if experts == 1:
        return
    rows = (kind.feed_forward for kind in args.layers.kinds)
    num_experts = next((row.num_experts for row in rows if isinstance(row, RoutedExperts)), 0)
    if num_experts == 0 or num_experts % experts:
        yield (
            f"parallelism.expert_parallel_degree ({experts}) must divide the model's experts, got "
            f"{num_experts} of them ({model.path})."
        )
    if args.enable_weight_tying:
        yield (
            f"parallelism.expert_parallel_degree must be 1 for a model with tied embeddings "
            f"({model.path}), got {experts}: experts have no FSDP group of their own in such a model."
        )


def layout_degrees(config: JobConfig) -> dict[str, int]:
    """Returns by what the ranks are divided, and the number of ``ranks`` as the last."""
    settings = config.parallelism
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    degrees = {
        "stages": settings.pipeline_parallel_degree,
        "replicas": settings.data_parallel_replicate_degree,
        "shards": settings.data_parallel_shard_degree,
        "context_parts": settings.context_parallel_degree,
        "tensor_parts": settings.tensor_parallel_degree,
    }
    if degrees["shards"] == -1:
        degrees["shards"] = world_size // math.prod(d for d in degrees.values() if d > 0)
    return degrees | {"ranks": world_size}


def describe_layout(config: JobConfig) -> str:
    """Returns the ranks as a product, such as ``8 = 2 stages x 2 shards x 2 tensor parts``."""
    degrees = layout_degrees(config)
    ranks = degrees.pop("ranks")
    parts = [f"{n} {name.replace('_', ' ')}" for name, n in degrees.items() if n > 1]
    return f"{ranks} = {' x '.join(parts)}" if parts else f"{ranks}"
