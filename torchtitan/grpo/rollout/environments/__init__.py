# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs environments, which answer the model between its turns in multi-turn rollouts.

In reading order: `protocol` (the interface of an environment), `turns` (how a completion consists of
turns and observations), `conversation` (what a chat template shows of earlier turns), `episode` (one
completion with its environment), `environment_pool` and `environment_worker` (the processes in which
environments run). `calculator` is an example, and `verifiers` is an adapter.
"""

from torchtitan.grpo.rollout.environments.environment_pool import (
    EnvironmentPool,
    EnvironmentsFailing,
)
from torchtitan.grpo.rollout.environments.episode import EnvironmentFailed, Episode, Episodes
from torchtitan.grpo.rollout.environments.protocol import Environment, Observation

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "EnvironmentPool",
    "EnvironmentsFailing",
    "Episode",
    "Episodes",
    "Observation",
]
