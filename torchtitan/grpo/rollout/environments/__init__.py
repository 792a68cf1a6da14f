# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs environments, which answer the model between its turns in multi-turn rollouts.

In reading order: `protocol` (what an environment is), `turns` (how a completion is made of
turns and observations), `episode` (one completion with its environment), `environment_pool` and
`environment_worker` (the processes that environments run in). `calculator` is an example, `verifiers` an adapter.
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
