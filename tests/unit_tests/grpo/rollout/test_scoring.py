# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from pathlib import Path

import numpy as np
import pytest
from rollouts import generation

from torchtitan.grpo.config import Reward
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.scoring import Scorer, weighted_sum
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt

FUNCTIONS = """
def length(completions, **kw):
    return [float(len(c)) for c in completions]

def even(completions, **kw):
    return [None if len(c) % 2 else 1.0 for c in completions]
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


async def test_rewards_are_weighted_sums_of_the_functions_that_apply(functions, codec):
    names = [f"{functions}:length", f"{functions}:even"]
    pool = RewardPool(names, Reward())
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


async def test_without_functions_each_reward_is_nothing_and_no_worker_is_asked(codec):
    pool = RewardPool([], Reward())  # not started: it could not answer
    rollouts = await Scorer(pool, codec, [], []).score(PROMPT, [generation(2)] * 2)
    assert [(rollout.reward, rollout.reward_components) for rollout in rollouts] == [(0.0, {})] * 2
