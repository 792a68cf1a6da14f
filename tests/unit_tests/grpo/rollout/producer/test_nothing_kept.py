# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
from typing import Any

import pytest

from torchtitan.grpo.rollout import kept_groups
from torchtitan.grpo.rollout.process import first_cause

FUNCTIONS = """
def none(completions, **kw):
    return [None] * len(completions)

def raises(completions, **kw):
    raise ValueError("no")

def refuse(completions, rewards, **kw):
    return [i == 0 for i in range(len(completions))]
"""
BOUND = 24
TRUNCATED, SHORT = {"drop_truncated": True}, {"min_completion_tokens": 100}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"filters": TRUNCATED}, ["rollout.drop_truncated = false", "Raise rollout.max"]),
        ({"filters": SHORT}, ["Lower rollout.min_completion_tokens"]),
        ({"reward": "none"}, ["reward.functions gave none"]),
        ({"reward": "raises"}, ["a reward function raised", "rollout_process.log"]),
        ({"acceptor": "refuse"}, ["Loosen rollout.should_accept"]),
    ],
    ids=["truncated", "short", "no_rewards", "rewards_raise", "none_accepted"],
)
async def test_a_producer_that_keeps_nothing_says_why(
    world_of, monkeypatch, settings: dict[str, Any], parts: list[str]
):
    monkeypatch.setattr(kept_groups, "FEWEST_GROUPS", BOUND)
    async with world_of("2345", max_staleness=1, code=FUNCTIONS, **settings) as world:
        world.may_end = True
        if settings.get("filters") is TRUNCATED:
            monkeypatch.setattr(world.servers[0].rng, "randint", lambda low, high: high)
        world.push(0)
        waiting = asyncio.create_task(world.producer.batch(0))
        await asyncio.wait({world.work}, timeout=60)
        assert world.work.done(), "it generated without end"
        assert not waiting.done()
        waiting.cancel()
        cause, num_drawn = first_cause(world.work.exception()), world.prompts.position
    assert isinstance(cause, kept_groups.NothingKept)
    for part in (f"At least one of {BOUND} consecutive groups", *parts):
        assert part in str(cause)
    assert BOUND <= num_drawn < 2 * BOUND
