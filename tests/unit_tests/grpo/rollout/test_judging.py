# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A group is trained on only if at least two of its rollouts can be compared."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from torchtitan.grpo.rollout.judging import GroupJudge, Unusable
from torchtitan.grpo.rollout.rollout_filters import CompletionFilter, WasteBudget
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.types import Generation, Prompt, Rollout, VersionSegment

PROMPT = Prompt(0, "1", np.array([3], np.int32), {})


def generation(length: int = 2) -> Generation:
    return Generation(
        np.full(length, 5, np.int32),
        np.full(length, -0.5, np.float32),
        "stop",
        (VersionSegment(0, 0, length),),
    )


class GivenRewards(Scorer):
    """Scores the completions of a group with given rewards, and accepts given ones."""

    def __init__(self, rewards: Sequence[float | None], accepts: Sequence[bool]) -> None:
        self.rewards = rewards
        self.accepts = accepts

    async def score(self, prompt: Prompt, generations: Sequence[Generation]) -> list[Rollout]:
        return [
            Rollout(
                prompt_ids=prompt.token_ids,
                token_ids=g.token_ids,
                logprobs=g.logprobs,
                segments=g.segments,
                finish_reason="stop",
                completion="7",
                reward=reward,
            )
            for g, reward in zip(generations, self.rewards, strict=False)
        ]

    async def accepted(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [r for r, accept in zip(rollouts, self.accepts, strict=False) if accept]


def judge(
    generations: Sequence[Generation],
    rewards: Sequence[float | None],
    *,
    accepts: Sequence[bool] = (True,) * 3,
    completion_filter: CompletionFilter | None = None,
    waste: WasteBudget | None = None,
    fewest_rollouts: int = 2,
) -> list[Rollout]:
    group_judge = GroupJudge(
        GivenRewards(rewards, accepts), completion_filter, waste, fewest_rollouts
    )
    return asyncio.run(group_judge.judge(PROMPT, generations))


def reason_of(*args, **kwargs) -> str:
    with pytest.raises(Unusable) as raised:
        judge(*args, **kwargs)
    return raised.value.reason


def test_two_rollouts_with_a_reward_are_enough():
    rollouts = judge([generation()] * 3, [1.0, None, 0.0])
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]


def test_one_completion_is_too_few():
    assert reason_of([generation()], [1.0]) == "failed"
    assert reason_of([], []) == "failed"


def test_one_completion_is_enough_where_samples_are_compared_over_the_batch():
    assert [r.reward for r in judge([generation()], [1.0], fewest_rollouts=1)] == [1.0]
    with pytest.raises(Unusable):
        judge([], [], fewest_rollouts=1)


def test_one_completion_that_passes_the_filter_is_too_few():
    generations = [generation(4), generation(1), generation(1)]
    only_long = CompletionFilter(min_tokens=2)
    assert reason_of(generations, [1.0], completion_filter=only_long) == "filtered"


def test_one_rollout_with_a_reward_is_too_few():
    assert reason_of([generation()] * 3, [None, 1.0, None]) == "unscored"


def test_one_accepted_rollout_is_too_few():
    rewards = [1.0, 0.0, 1.0]
    assert reason_of([generation()] * 3, rewards, accepts=(True, False, False)) == "filtered"


def test_equal_rewards_are_dropped_until_the_budget_is_spent():
    equal, waste = [1.0, 1.0, 1.0], WasteBudget(1)
    assert reason_of([generation()] * 3, equal, waste=waste) == "filtered"
    assert len(judge([generation()] * 3, equal, waste=waste)) == 3
    assert waste.num_dropped == 1
