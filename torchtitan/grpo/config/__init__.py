# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The TOML tables that this project adds to torchtitan's, one dataclass each.

The tables are plain data and import no torch, so that the rollout process can import them.
`command_line/` reads a TOML file and the command line into them, and `config_checks/`
refuses settings that cannot work.
"""

from torchtitan.grpo.config.cluster import ClusterRow
from torchtitan.grpo.config.evaluation import Evaluation
from torchtitan.grpo.config.grpo import GRPO, Critic, LoRA
from torchtitan.grpo.config.inference import Inference, WeightSync
from torchtitan.grpo.config.judge import Judge
from torchtitan.grpo.config.observe import Guards, Observe
from torchtitan.grpo.config.prompts import Prompts
from torchtitan.grpo.config.rollout import Agent, Reward, Rollout, Workers
from torchtitan.grpo.config.rollout_process import RolloutProcessConfig
from torchtitan.grpo.config.teacher import SFT, Teacher

SECRETS = (("inference", "api_key"), ("inference", "admin_key"), ("teacher", "api_key"))
"""Table and key of each setting whose value is shown to nobody."""

__all__ = [
    "GRPO",
    "SECRETS",
    "SFT",
    "Agent",
    "ClusterRow",
    "Critic",
    "Evaluation",
    "Guards",
    "Inference",
    "Judge",
    "LoRA",
    "Observe",
    "Prompts",
    "Reward",
    "Rollout",
    "RolloutProcessConfig",
    "Teacher",
    "WeightSync",
    "Workers",
]
