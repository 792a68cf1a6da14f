# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which completions and groups are left out, and how many at most."""

import numpy as np
import pytest

from torchtitan.grpo.rollout.rollout_filters import CompletionFilter, WasteBudget, is_informative
from torchtitan.grpo.types import FinishReason, Generation, Rollout, VersionSegment


def generation(num_tokens: int, finish_reason: FinishReason = "stop") -> Generation:
    ids = np.arange(num_tokens, dtype=np.int32)
    segments = (VersionSegment(0, 0, num_tokens),)
    return Generation(ids, np.zeros(num_tokens, np.float32), finish_reason, segments)


def rollout(reward: float) -> Rollout:
    one = generation(1)
    return Rollout(
        prompt_ids=one.token_ids,
        token_ids=one.token_ids,
        logprobs=one.logprobs,
        segments=one.segments,
        finish_reason="stop",
        completion="",
        reward=reward,
    )


def test_nothing_is_left_out_unless_asked_for():
    some = [generation(1), generation(9, "length")]
    assert CompletionFilter().keep(some) == some


@pytest.mark.parametrize(
    ("completion_filter", "kept"),
    [
        (CompletionFilter(min_tokens=3), [1, 2]),
        (CompletionFilter(drop_truncated=True), [0, 1]),
        (CompletionFilter(min_tokens=3, drop_truncated=True), [1]),
    ],
)
def test_short_and_truncated_completions_are_left_out(completion_filter, kept):
    some = [generation(2), generation(3), generation(9, "length")]
    assert completion_filter.keep(some) == [some[i] for i in kept]


def test_only_groups_of_different_rewards_have_something_to_learn_from():
    assert is_informative([rollout(0.0), rollout(1.0)])
    assert not is_informative([rollout(0.5), rollout(0.5)])


def test_a_budget_is_of_one_batch():
    budget = WasteBudget(2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.next_batch()
    assert budget.spend()
    assert not WasteBudget(0).spend()
