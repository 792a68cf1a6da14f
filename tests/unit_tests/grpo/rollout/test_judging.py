# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import rollouts
from rollouts import generation

from torchtitan.grpo import config
from torchtitan.grpo.rollout.judging import GroupJudge, Rules, Unusable
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.types import Generation, Prompt, Rollout

PROMPT = Prompt(0, "1", np.array([3], np.int32), {})
THREE = [generation(2)] * 3


class GivenRewards(Scorer):
    """Scores the completions of a group with given rewards, and accepts given ones."""

    def __init__(self, rewards: Sequence[float | None], accepts: Sequence[bool]) -> None:
        self.rewards, self.accepts = rewards, accepts

    async def score(self, prompt: Prompt, generations: Sequence[Generation]) -> list[Rollout]:
        return [
            rollouts.rollout(len(generation.token_ids), reward)
            for generation, reward in zip(generations, self.rewards, strict=False)
        ]

    async def accepted(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [r for r, accept in zip(rollouts, self.accepts, strict=False) if accept]


def make_judge(
    rewards: Sequence[float | None],
    accepts: Sequence[bool] = (True,) * 3,
    *,
    group_size: int = 3,
    **settings: Any,
) -> GroupJudge:
    grpo = config.GRPO(group_size=group_size, prompts_per_step=1)
    rollout = config.Rollout(**settings)
    return GroupJudge({"": Rules(GivenRewards(rewards, accepts), rollout)}, rollout, grpo)


def judged(group_judge: GroupJudge, generations: Sequence[Generation]) -> list[Rollout]:
    return asyncio.run(group_judge.judge(PROMPT, generations))


def test_as_many_rollouts_as_are_compared_are_enough():
    assert [r.reward for r in judged(make_judge([1.0, None, 0.0]), THREE)] == [1.0, 0.0]
    assert len(judged(make_judge([1.0], group_size=1), [generation(2)])) == 1


ONE_LONG = [generation(4), generation(1), generation(1)]
TOO_FEW = {
    "one completion": ([generation(2)], [[1.0]], {}, "failed"),
    "none": ([], [[]], {"group_size": 1}, "failed"),
    "one that passes the filter": (ONE_LONG, [[1.0]], {"min_completion_tokens": 2}, "filtered"),
    "one with a reward": (THREE, [[None, 1.0, None]], {}, "unscored"),
    "one that is accepted": (THREE, [[1.0, 0.0, 1.0], (True, False, False)], {}, "filtered"),
}


@pytest.mark.parametrize("case", TOO_FEW)
def test_too_few_are_unusable(case):
    generations, arguments, settings, reason = TOO_FEW[case]
    with pytest.raises(Unusable) as raised:
        judged(make_judge(*arguments, **settings), generations)
    assert raised.value.reason == reason


def test_equal_rewards_are_dropped_until_the_budget_of_the_batch_is_spent():
    judge = make_judge([1.0, 1.0, 1.0], dynamic_sampling=True, dynamic_sampling_limit=1)
    for turn in (1, 2):
        with pytest.raises(Unusable, match="All its rewards are equal"):
            judged(judge, THREE)
        assert len(judged(judge, THREE)) == 3
        assert judge.num_equal_dropped == turn
        judge.next_batch()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [2, 3, 9]),
        ({"min_completion_tokens": 3}, [3, 9]),
        ({"drop_truncated": True}, [2, 3]),
        ({"min_completion_tokens": 3, "drop_truncated": True}, [3]),
    ],
)
def test_short_and_truncated_completions_are_left_out(settings, kept):
    some = [generation(2), generation(3), replace(generation(9), finish_reason="length")]
    judge = make_judge([0.0, 0.5, 1.0], group_size=1, **settings)
    assert [len(rollout.token_ids) for rollout in judged(judge, some)] == kept
