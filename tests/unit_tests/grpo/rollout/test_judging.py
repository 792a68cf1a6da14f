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

from torchtitan.grpo.rollout.judging import CompletionFilter, GroupJudge, Unusable, WasteBudget
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
            rollouts.rollout(2, reward)
            for _, reward in zip(generations, self.rewards, strict=False)
        ]

    async def accepted(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [r for r, accept in zip(rollouts, self.accepts, strict=False) if accept]


def judge(
    generations: Sequence[Generation],
    rewards: Sequence[float | None],
    accepts: Sequence[bool] = (True,) * 3,
    **settings: Any,
) -> list[float | None]:
    group_judge = GroupJudge(GivenRewards(rewards, accepts), **settings)
    return [r.reward for r in asyncio.run(group_judge.judge(PROMPT, generations))]


def test_as_many_rollouts_as_are_compared_are_enough():
    assert judge(THREE, [1.0, None, 0.0]) == [1.0, 0.0]
    assert judge([generation(2)], [1.0], fewest_rollouts=1) == [1.0]


LONG = CompletionFilter(min_tokens=2)
TOO_FEW = {
    "one completion": (([generation(2)], [1.0]), {}, "failed"),
    "none": (([], []), {"fewest_rollouts": 1}, "failed"),
    "one that passes the filter": (
        ([generation(4), generation(1), generation(1)], [1.0]), {"completion_filter": LONG}, "filtered",
    ),
    "one with a reward": ((THREE, [None, 1.0, None]), {}, "unscored"),
    "one that is accepted": ((THREE, [1.0, 0.0, 1.0], (True, False, False)), {}, "filtered"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_FEW)
def test_too_few_are_unusable(case):
    arguments, settings, reason = TOO_FEW[case]
    with pytest.raises(Unusable) as raised:
        judge(*arguments, **settings)
    assert raised.value.reason == reason


def test_equal_rewards_are_dropped_until_the_budget_of_the_batch_is_spent():
    waste = WasteBudget(1)
    for turn in (1, 2):
        with pytest.raises(Unusable, match="All its rewards are equal"):
            judge(THREE, [1.0, 1.0, 1.0], waste=waste)
        assert len(judge(THREE, [1.0, 1.0, 1.0], waste=waste)) == 3
        assert waste.num_dropped == turn
        waste.next_batch()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2]),
        ({"min_tokens": 3}, [1, 2]),
        ({"drop_truncated": True}, [0, 1]),
        ({"min_tokens": 3, "drop_truncated": True}, [1]),
    ],
)
def test_short_and_truncated_completions_are_left_out(settings, kept):
    some = [generation(2), generation(3), replace(generation(9), finish_reason="length")]
    assert CompletionFilter(**settings).keep(some) == [some[i] for i in kept]
