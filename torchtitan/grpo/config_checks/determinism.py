# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that a run that is to be repeatable to the bit can be."""

from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.job_config import JobConfig


def check_determinism(config: JobConfig) -> None:
    """Refuses ``rollout.deterministic`` with settings under which timing decides what is sampled."""
    rollout, inference = config.rollout, config.inference
    if rollout.deterministic:
        needed = {
            "rollout.max_head_offpolicyness = 0": rollout.max_head_offpolicyness == 0,
            "inference.launch = true": inference.launch,
            'inference.kind = "embedded"': inference.kind == "embedded",
            "rollout.environment unset": rollout.environment is None,
            "rollout.dynamic_sampling = false": not rollout.dynamic_sampling,
            "rollout.stream = false": not rollout.stream,
        }
        for setting, holds in needed.items():
            require(
                holds,
                f"rollout.deterministic = true needs {setting}: otherwise what is sampled, or what is "
                "trained together, depends on timing. Set it, or leave rollout.deterministic at false.",
            )
