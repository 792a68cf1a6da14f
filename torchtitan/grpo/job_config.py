# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""All tables of a run's configuration: torchtitan's own and those that the overlay adds."""

from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import job_config

from torchtitan.grpo import config as grpo_config


@dataclass
class Model(job_config.Model):
    """``[model]``: torchtitan's table; a Hugging Face directory says the rest."""

    name: str = "huggingface"
    """Always ``huggingface``: the architecture is read from ``hf_assets_path``."""

    flavor: str = "directory"
    """Always ``directory``: sizes are read from ``hf_assets_path``."""

    hf_assets_path: str = ""
    """Hugging Face directory with config.json, tokenizer.json and safetensors. Required."""


@dataclass
class JobConfig(job_config.JobConfig):
    """Torchtitan's tables and those of `torchtitan/grpo/config/`."""

    model: Model = field(default_factory=Model)
    grpo: grpo_config.GRPO = field(default_factory=grpo_config.GRPO)
    prompts: grpo_config.Prompts = field(default_factory=grpo_config.Prompts)
    rollout: grpo_config.Rollout = field(default_factory=grpo_config.Rollout)
    inference: grpo_config.Inference = field(default_factory=grpo_config.Inference)
    weight_sync: grpo_config.WeightSync = field(default_factory=grpo_config.WeightSync)
    reward: grpo_config.Reward = field(default_factory=grpo_config.Reward)
    evaluation: grpo_config.Evaluation = field(default_factory=grpo_config.Evaluation)
    observe: grpo_config.Observe = field(default_factory=grpo_config.Observe)

    def to_dict(self) -> dict[str, Any]:
        """What is printed, logged and saved of a configuration: keys are masked."""
        values = super().to_dict()
        for name in ("api_key", "admin_key"):
            if values["inference"][name]:
                values["inference"][name] = "***"
        return values
