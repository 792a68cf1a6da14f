# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A producer that keeps no group ends with what became of its groups."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from producer_world import Settings, make_world

from torchtitan.grpo.config import Reward
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout import kept_groups
from torchtitan.grpo.rollout.judging import CompletionFilter
from torchtitan.grpo.rollout.process import first_cause
from torchtitan.grpo.rollout.tokenizer import TextCodec

FUNCTIONS = """
def none(completions, **kw):
    return [None] * len(completions)

def raises(completions, **kw):
    raise ValueError("no")

def refuse(completions, rewards, **kw):
    return [i == 0 for i in range(len(completions))]
"""
BOUND = 24

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "truncated": (
        {"completion_filter": CompletionFilter(drop_truncated=True)},
        ["rollout.drop_truncated = false", "Raise rollout.max_new_tokens"],
    ),
    "short": (
        {"completion_filter": CompletionFilter(min_tokens=100)},
        ["Lower rollout.min_completion_tokens"],
    ),
    "no_rewards": ({"reward": "none"}, ["reward.functions gave none"]),
    "rewards_raise": ({"reward": "raises"}, ["a reward function raised", "rollout_process.log"]),
    "none_accepted": ({"acceptor": "refuse"}, ["Loosen rollout.should_accept"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_producer_that_keeps_nothing_says_why(case, tmp_path: Path, repository, monkeypatch):
    chosen, parts = CASES[case]
    monkeypatch.setattr(kept_groups, "FEWEST_GROUPS", BOUND)
    functions, prompts = tmp_path / "functions.py", tmp_path / "prompts.jsonl"
    functions.write_text(FUNCTIONS)
    prompts.write_text(
        "".join(json.dumps({"prompt": str(i), "answer": "7"}) + "\n" for i in "2345")
    )
    chosen = {
        key: f"{functions}:{value}" if isinstance(value, str) else value
        for key, value in chosen.items()
    }
    settings = Settings(max_staleness=1, **chosen)

    async def run() -> tuple[BaseException | None, int]:
        acceptors = [settings.acceptor] if settings.acceptor is not None else []
        pool = RewardPool(
            [settings.reward, "exact_match", *acceptors], Reward(max_consecutive_failures=1000)
        )
        await pool.start()
        codec = TextCodec(str(repository / "assets/reverse_digits/model"), [1])
        world = make_world(prompts, codec, pool, settings)
        if case == "truncated":
            (server,) = world.servers
            monkeypatch.setattr(server.rng, "randint", lambda low, high: high)
        world.push(world.servers[0], 0)
        working = asyncio.create_task(world.producer.run())
        waiting = asyncio.create_task(world.producer.batch(0))
        try:
            await asyncio.wait({working}, timeout=60)
            assert not waiting.done()
            return (working.exception() if working.done() else None), world.prompts.position
        finally:
            working.cancel()
            waiting.cancel()
            await asyncio.gather(working, waiting, return_exceptions=True)
            await pool.close()

    error, num_drawn = asyncio.run(run())
    assert error is not None, "it generated without end"
    cause = first_cause(error)
    assert isinstance(cause, kept_groups.NothingKept)
    assert f"At least one of {BOUND} consecutive groups" in str(cause)
    for part in parts:
        assert part in str(cause)
    assert BOUND <= num_drawn < 2 * BOUND
