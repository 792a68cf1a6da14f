# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Settings that must be set, must not be set, or must lie within their bounds."""

import math

from torchtitan.grpo.config.bounds import bounded_settings
from torchtitan.grpo.config.field_docs import field_docs, first_sentence
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import get, require


def check_required(config: JobConfig) -> None:
    require(
        bool(config.model.hf_assets_path),
        "model.hf_assets_path must name a Hugging Face model directory, got nothing.",
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


_SENT = (
    *("grpo", "prompts", "rollout", "inference", "reward", "reward.judge", "workers", "teacher"),
    "evaluation",
)
"""Tables that the rollout process receives as JSON, which has no infinite numbers."""


def check_ranges(config: JobConfig) -> None:
    for key, bounds, value in bounded_settings(config):
        if not bounds.allow(value):
            require(False, f"{key} must be {bounds}, got {value}.{_meaning(config, key)}")
    for key in _SENT:
        for name, value in vars(get(config, key)).items():
            if isinstance(value, float) and not math.isfinite(value):
                name = f"{key}.{name}"
                require(False, f"{name} must be finite, got {value}.{_meaning(config, name)}")
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
    """Returns the first sentence of the setting's documentation, to be appended to an error message."""
    table, _, name = key.rpartition(".")
    row = config.cluster.get(table.removeprefix("cluster."))
    text = field_docs(type(row or get(config, table))).get(name)
    return f" What it sets: {first_sentence(text)}".replace("``", "") if text else ""
