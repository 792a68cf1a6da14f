# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From completions to rewards, with a real scoring worker."""

from pathlib import Path

import numpy as np
import pytest
from rollouts import generation

from torchtitan.grpo.config import Reward
from torchtitan.grpo.rewards.scoring_pool import RewardPool, ScoringFailed
from torchtitan.grpo.rollout.judging import GroupJudge, Unusable
from torchtitan.grpo.rollout.scoring import Scorer, weighted_sum
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt

FUNCTIONS = """
import time

def length(completions, **kw):
    return [float(len(c)) for c in completions]

def even(completions, **kw):
    return [None if len(c) % 2 else 1.0 for c in completions]

def hang(completions, **kw):
    time.sleep(1000)
"""
PROMPT = Prompt(0, "1->", np.array([5], np.int32), {})


@pytest.fixture
def codec(repository: Path) -> TextCodec:
    return TextCodec(str(repository / "assets/reverse_digits/model"), [1])


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


def pool_of(names: list[str], timeout_seconds: float) -> RewardPool:
    return RewardPool(names, Reward(timeout_seconds=timeout_seconds))


async def test_rewards_are_weighted_sums_of_the_functions_that_apply(functions, codec):
    names = [f"{functions}:length", f"{functions}:even"]
    pool = pool_of(names, 60.0)
    generations = [generation(codec.encode(text)) for text in ("12", "123")]
    try:
        await pool.start()
        rollouts = await Scorer(pool, codec, names, [0.5, -3.0]).score(PROMPT, generations)
    finally:
        await pool.close()
    assert [rollout.reward for rollout in rollouts] == [0.5 * 2 - 3.0 * 1, 0.5 * 3]
    components = [rollout.reward_components for rollout in rollouts]
    assert components == [{"length": 2.0, "even": 1.0}, {"length": 3.0}]
    assert weighted_sum([None, None], [1.0, 2.0]) is None


async def test_a_group_that_cannot_be_scored_is_unscored_and_not_zero(functions, codec):
    names = [f"{functions}:hang"]
    pool = pool_of(names, 0.5)
    generations = [generation(codec.encode("12"))] * 2
    try:
        await pool.start()
        scorer = Scorer(pool, codec, names, [])
        with pytest.raises(ScoringFailed, match="longer than"):
            await scorer.score(PROMPT, generations)
        with pytest.raises(Unusable) as caught:
            await GroupJudge(scorer).judge(PROMPT, generations)
    finally:
        await pool.close()
    assert (caught.value.reason, pool.failures["timeout"]) == ("unscored", 2)


async def test_without_functions_each_reward_is_nothing_and_no_worker_is_asked(codec):
    pool = pool_of([], 1.0)  # not started: it could not answer
    rollouts = await Scorer(pool, codec, [], []).score(PROMPT, [generation(2)] * 2)
    assert [(rollout.reward, rollout.reward_components) for rollout in rollouts] == [(0.0, {})] * 2
