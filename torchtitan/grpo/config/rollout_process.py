# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The configuration that rank 0 hands to the rollout process."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan.grpo.config.cluster import ClusterRow
from torchtitan.grpo.config.evaluation import Evaluation
from torchtitan.grpo.config.grpo import GRPO
from torchtitan.grpo.config.inference import Inference
from torchtitan.grpo.config.prompts import Prompts
from torchtitan.grpo.config.rollout import Agent, Reward, Rollout, Workers
from torchtitan.grpo.config.teacher import Teacher
from torchtitan.grpo.types import PromptProgress


@dataclass
class RolloutProcessConfig:
    """What rank 0 tells the rollout process: the tables that it needs, and facts about the run."""

    grpo: GRPO
    prompts: Prompts
    rollout: Rollout
    inference: Inference
    reward: Reward
    evaluation: Evaluation
    hf_assets_path: str
    """Directory of the model: the tokenizer, and the weights that launched servers load."""
    vocab_size: int
    """Number of token ids that the model knows."""
    eos_token_ids: list[int]
    """End-of-sequence tokens of the model."""
    seq_len: int
    """``training.seq_len``: a prompt with its completion must fit into one row of this length."""
    seed: int
    """``debug.seed``, or 0 if it is not set."""
    dump_folder: str
    """``job.dump_folder``, where logs and saved rollouts are written."""
    gpus: list[str]
    """GPUs of this machine, named as in ``CUDA_VISIBLE_DEVICES``; training ranks use the first
    ``num_training_gpus``."""
    start_version: int
    """Policy version at the start: above 0 in a resumed run, the number of batches trained on."""
    progress: PromptProgress
    """Prompts that a resumed run has already used, and those with which it must start."""
    num_steps: int = 0
    """``training.steps``, for reward functions."""
    date: str = ""
    """What chat templates take for now, in ISO format: the time of the run's first start. If it is
    empty, it is the time of the first rendering."""
    agent: Agent = field(default_factory=Agent)
    workers: Workers = field(default_factory=Workers)
    teacher: Teacher = field(default_factory=Teacher)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    saved_rollouts: str | None = None
    """File with the rollouts that were finished when the checkpoint was written."""
    incarnation: int = 0
    """Number of earlier rollout processes of this run."""
    samples_per_step: int = 0
    """``observe.samples_per_step``: rank 0 always receives the token ids of these groups."""
    num_training_gpus: int = 0
    cluster: dict[str, ClusterRow] = field(default_factory=dict)
    lent_part: float = 0.0
    """Part of the memory of each GPU that waiting training ranks leave to launched servers
    to which it is lent; 0 if no GPU is lent."""
    monitor_host: str = ""
    """Address on which ``/healthz`` and ``/metrics`` are served; empty if they are not."""
    monitor_port: int = 0
    """Port of ``/healthz`` and ``/metrics``; 0 uses a free port."""
    stuck_seconds: float = 600.0
    """``observe.stuck_seconds``."""
    timeline: bool = False
    """``observe.timeline``."""
    fetch_host: str = ""
    """Address of this host for the ranks: where launched servers listen, and where ranks fetch
    rollouts with ``prompts.single_rank_load = false``."""
    fetch_secret: str = ""
    """Token that each fetch of rollouts by a rank must present."""

    @property
    def has_episodes(self) -> bool:
        """Whether an environment or an agent may give a completion its reward."""
        return self.rollout.environment is not None or self.agent.is_used

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
