# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Environments answer the model between its turns in multi-turn rollouts.

In reading order: `protocol` (the interface of an environment), `episode` (one completion with its
environment), `environment_pool` and `environment_worker` (the processes in which environments run).
`calculator` is an example, and `verifiers` is an adapter.
"""

from torchtitan.grpo.rollout.agents.failures import EnvironmentFailed, EnvironmentsFailing
from torchtitan.grpo.rollout.environments.protocol import Environment, Observation

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "EnvironmentsFailing",
    "Observation",
]
