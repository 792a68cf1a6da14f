# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Pools of real reward workers."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from processes import descendants

from torchtitan.grpo.config import Reward
from torchtitan.grpo.rewards.scoring_pool import RewardPool

WORKER = "torchtitan.grpo.rewards.scoring_worker"


@contextlib.asynccontextmanager
async def reward_pool(
    functions: Sequence[str], reward: Reward | None = None, **settings: Any
) -> AsyncIterator[RewardPool]:
    """A started pool, whose workers must end with it."""
    pool = RewardPool(functions, reward or Reward(), **settings)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()
    assert not descendants(WORKER), "a worker outlived its pool"
