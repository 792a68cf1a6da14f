# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks ``[critic]``: that values of tokens fit the other settings."""

import functools
from pathlib import Path

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import forbid, require
from torchtitan.grpo.models.hub import is_hub_name

_SETTING = 'grpo.advantage = "gae"'


def check_critic(config: JobConfig) -> None:
    """Also forbids what takes advantages as relative to a group, or as those of whole sequences."""
    if not config.has_critic:
        return
    grpo, optimizer, teacher = config.grpo, config.optimizer, config.teacher
    require(
        config.sft.path is None and config.has_rewards,
        f"{_SETTING} needs rewards to estimate, and "
        f"{'sft.path' if config.sft.path else 'teacher.urls without reward.functions'} gives none. "
        "Choose another grpo.advantage.",
    )
    with_critic = functools.partial(forbid, _SETTING)
    with_critic(
        {"lora.rank above 0": config.lora.rank > 0},
        "adapters save the memory of a model's optimizer states, and the critic, all of whose weights are "
        "trained, would need that memory again. Set lora.rank = 0, or choose another grpo.advantage.",
    )
    is_original = optimizer.name == "Muon" and optimizer.muon_adjust_lr == "original"
    with_critic(
        {"optimizer.muon_adjust_lr = 'original'": is_original},
        "critic.lr is also Muon's for the critic, and with 'original' its updates are not as large as "
        "AdamW's. Use 'match_rms_adamw'.",
    )
    equal_rewards = {
        "grpo.filter_zero_advantage": grpo.filter_zero_advantage,
        "rollout.dynamic_sampling": config.rollout.dynamic_sampling,
    }
    with_critic(
        equal_rewards,
        "groups with equal rewards have advantages other than 0, and the critic learns from them. Set it "
        "to false.",
    )
    with_critic(
        {"grpo.off_policy_mask_threshold": grpo.off_policy_mask_threshold > 0},
        "it leaves out sequences by the sign of their advantage, and each token has its own. Set it to 0.",
    )
    with_critic(
        {"teacher.urls without teacher.top_k": bool(teacher.urls) and not teacher.top_k},
        "the teacher's part of advantages is relative to the group's mean, and those of the critic are "
        "not. Set teacher.top_k, which makes it a term of the loss.",
    )
    path = config.critic.path
    require(
        path is None or Path(path).is_dir() or is_hub_name(path),
        f"critic.path must be a Hugging Face model directory, or a name on the Hub, got {path}.",
    )
