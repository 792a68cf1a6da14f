# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Settings that must be set, must not be set, or must lie within their bounds."""

import math

from torchtitan.grpo.config.bounds import at_least, bounded_settings
from torchtitan.grpo.config.field_docs import field_docs, first_sentence
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import get, require


def check_required(config: JobConfig) -> None:
    require(
        bool(config.model.hf_assets_path),
        "model.hf_assets_path must name a Hugging Face model directory, got nothing.",
    )
    require(
        (config.model.name, config.model.flavor) == ("huggingface", "directory"),
        "model.name and model.flavor are not used, because the model is read from "
        f"model.hf_assets_path. Remove them (got {config.model.name!r}, {config.model.flavor!r}).",
    )
    if not config.has_servers:
        return  # recorded rollouts have their rewards, and supervised examples need none
    require(
        bool(config.reward.functions or config.teacher.urls),
        "reward.functions must name at least one function, got none. Only with a teacher (teacher.urls) "
        "can a run learn without rewards.",
    )
    weights = config.reward.weights
    require(
        not weights or len(weights) == len(config.reward.functions),
        f"reward.weights must have one entry for each of the {len(config.reward.functions)} "
        f"reward.functions, got {len(weights)}.",
    )


_REFUSED = {
    "validation.enable": "held-out prompts are completed and scored by [evaluation]",
    "checkpoint.create_seed_checkpoint": "a run begins with the weights of model.hf_assets_path",
    "training.enable_cpu_offload": "weights are pushed from the device that they are trained on",
    "memory_estimation.enable": "only torchtitan's own estimation script reads it",
    "fault_tolerance.enable": "the weight push supports a single replica group",
    "model.converters": "servers receive plain weights and do not round as a converted model "
    "(float8, mx) does, so their log-probabilities would not be those of the trained policy",
}
"""Torchtitan's keys that would be ignored here or would fail later, with the reason."""


def check_refused(config: JobConfig) -> None:
    for key, reason in _REFUSED.items():
        value = get(config, key)
        require(not value, f"{key} must be left at its default, got {value!r}: {reason}.")


_UPSTREAM_BOUNDS = {
    "training.steps": at_least(1),
    "training.local_batch_size": at_least(1),
    "parallelism.data_parallel_replicate_degree": at_least(1),
    "parallelism.context_parallel_degree": at_least(1),
    "parallelism.tensor_parallel_degree": at_least(1),
    "parallelism.pipeline_parallel_degree": at_least(1),
    "parallelism.expert_parallel_degree": at_least(1),
    "parallelism.pipeline_parallel_layers_per_stage": at_least(1),
    "parallelism.pipeline_parallel_first_stage_less_layers": at_least(0),
    "parallelism.pipeline_parallel_last_stage_less_layers": at_least(0),
}
"""Bounds of torchtitan's keys. Those of this project's tables stand at their fields."""

_SENT = (
    *("grpo", "prompts", "rollout", "inference", "reward", "reward.judge", "workers", "teacher"),
    "evaluation",
)
"""Tables that the rollout process receives as JSON, which has no infinite numbers."""


def check_ranges(config: JobConfig) -> None:
    upstream = ((key, bounds, get(config, key)) for key, bounds in _UPSTREAM_BOUNDS.items())
    for key, bounds, value in (*upstream, *bounded_settings(config)):
        if not bounds.allow(value):
            require(False, f"{key} must be {bounds}, got {value}.{_meaning(config, key)}")
    for key in _SENT:
        for name, value in vars(get(config, key)).items():
            if isinstance(value, float) and not math.isfinite(value):
                name = f"{key}.{name}"
                require(False, f"{name} must be finite, got {value}.{_meaning(config, name)}")
    require(
        config.checkpoint.last_save_model_only or not config.checkpoint.last_save_in_hf,
        "checkpoint.last_save_in_hf needs checkpoint.last_save_model_only = true, got false: a whole "
        "checkpoint has no such form. The model is exported to <dump_folder>/hf in any case.",
    )
    total, steps = config.lr_scheduler.total_steps, config.training.steps
    is_replay = config.rollout.replay is not None  # may end before training.steps
    require(
        total is None or total >= steps or is_replay,
        f"lr_scheduler.total_steps must be at least training.steps ({steps}), because the schedule "
        f"ends there, got {total}. Raise it, or remove it to use training.steps.",
    )
    concurrent = config.rollout.max_concurrent_rollouts
    require(
        concurrent >= config.grpo.group_size,
        "rollout.max_concurrent_rollouts must be at least grpo.group_size "
        f"({config.grpo.group_size}), or no group could ever start, got {concurrent}.",
    )


def _meaning(config: JobConfig, key: str) -> str:
    """The first sentence of the field's documentation, to be appended to a message."""
    table, _, name = key.rpartition(".")
    row = config.cluster.get(table.removeprefix("cluster."))
    text = field_docs(type(row or get(config, table))).get(name)
    return f" What it sets: {first_sentence(text)}".replace("``", "") if text else ""
