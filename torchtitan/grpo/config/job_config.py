# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""All tables of a run's configuration."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torchtitan.grpo import config as grpo_config
from torchtitan.grpo.config.cluster import lent_groups
from torchtitan.grpo.config.environments import reward_functions
from torchtitan.grpo.config.frame import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Compile,
    Debug,
    Job,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Profiling,
    Training,
)


@dataclass
class JobConfig:
    """The tables of `frame.py`, and those of the other files of this folder."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    grpo: grpo_config.GRPO = field(default_factory=grpo_config.GRPO)
    critic: grpo_config.Critic = field(default_factory=grpo_config.Critic)
    lora: grpo_config.LoRA = field(default_factory=grpo_config.LoRA)
    prompts: grpo_config.Prompts = field(default_factory=grpo_config.Prompts)
    rollout: grpo_config.Rollout = field(default_factory=grpo_config.Rollout)
    agent: grpo_config.Agent = field(default_factory=grpo_config.Agent)
    inference: grpo_config.Inference = field(default_factory=grpo_config.Inference)
    cluster: dict[str, grpo_config.ClusterRow] = field(default_factory=dict)
    """Tables ``[cluster.NAME]``, each with ``tags`` (``rollout``, or ``train`` and ``rollout``),
    ``num_servers`` and ``gpus``. They say which servers the run launches on rank 0's machine, and
    whether they share the GPUs of training ranks, in place of ``inference.num_servers`` and
    ``inference.lend``. docs/servers.md has an example."""

    weight_sync: grpo_config.WeightSync = field(default_factory=grpo_config.WeightSync)
    reward: grpo_config.Reward = field(default_factory=grpo_config.Reward)
    teacher: grpo_config.Teacher = field(default_factory=grpo_config.Teacher)
    workers: grpo_config.Workers = field(default_factory=grpo_config.Workers)
    evaluation: grpo_config.Evaluation = field(default_factory=grpo_config.Evaluation)
    sft: grpo_config.SFT = field(default_factory=grpo_config.SFT)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tables ``[environments.NAME]``, each with a ``prompts.path`` and with settings that replace
    those of the run for its prompts, so that one run trains in several environments. ``weight`` is
    the relative frequency with which its prompts are drawn. It is set in all environments or in
    none; without it, they are drawn from in proportion to their numbers of prompts.
    docs/environments.md has an example."""

    guards: grpo_config.Guards = field(default_factory=grpo_config.Guards)
    observe: grpo_config.Observe = field(default_factory=grpo_config.Observe)

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a second trained model, which estimates values."""
        return self.grpo.advantage == "gae"

    @property
    def has_servers(self) -> bool:
        """Whether servers generate rollouts, as in all runs but replays and supervised training."""
        return self.rollout.replay is None and self.sft.path is None

    @property
    def lends_devices(self) -> bool:
        """Whether servers use the training devices while training waits."""
        return self.has_servers and bool(lent_groups(self))

    @property
    def may_be_taught(self) -> bool:
        """Whether rollouts may have a teacher's ratings, from running teachers or from a replayed file."""
        return bool(self.teacher.urls) or self.rollout.replay is not None

    @property
    def has_rewards(self) -> bool:
        """Whether the run learns from rewards, and not only from examples or a teacher."""
        is_taught = bool(self.teacher.urls) and not reward_functions(self)
        return self.sft.path is None and not is_taught

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as plain data for printing and logging, with API keys masked."""
        values = dataclasses.asdict(self)
        for table, name in grpo_config.SECRETS:
            if values[table][name]:
                values[table][name] = "***"
        return values
