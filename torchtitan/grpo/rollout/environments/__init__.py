# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Environments answer the model between its turns in multi-turn rollouts.

In reading order: `protocol` (the interface of an environment), `program` (one episode, run like one of
an agent in `rollout/agents/`), and `player` (calls environments in a worker process). `calculator` is an
example.
"""

from torchtitan.grpo.rollout.environments.protocol import (
    Environment,
    EnvironmentFailed,
    EnvironmentsFailing,
    Observation,
)

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "EnvironmentsFailing",
    "Observation",
]
