# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""All tables of a run's configuration: torchtitan's own, and those that this project adds."""

from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import job_config

from torchtitan.grpo import config as grpo_config


@dataclass
class Model(job_config.Model):
    """``[model]``: torchtitan's table. A Hugging Face directory determines the model."""

    name: str = "huggingface"
    """Must stay ``huggingface``: the architecture is read from ``hf_assets_path``."""

    flavor: str = "directory"
    """Must stay ``directory``: the sizes are read from ``hf_assets_path``."""

    hf_assets_path: str = ""
    """Hugging Face directory with config.json, tokenizer.json and safetensors files. Required."""


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
        """Returns the configuration as plain data for printing and logging, with keys masked."""
        values = super().to_dict()
        for name in ("api_key", "admin_key"):
            if values["inference"][name]:
                values["inference"][name] = "***"
        return values
