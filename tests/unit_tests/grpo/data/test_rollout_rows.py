# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A rollout of several rows is one sample: it weighs as much, and travels as it is."""

import dataclasses

import numpy as np
import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import token_cost
from torchtitan.grpo.data.rows import sequences_of
from torchtitan.grpo.data.step_plan import StepPlan, plan_step
from torchtitan.grpo.rollout.completion_checks import longest_sequence
from torchtitan.grpo.rollout.joining import joined
from torchtitan.grpo.types import (
    Generation,
    Rollout,
    RolloutGroup,
    VersionSegment,
    without_contexts,
)

PROMPT = np.array([2, 3], np.int32)


def rollout(reward: float, rows: tuple[tuple[int, int], ...] = ()) -> Rollout:
    """Ten tokens: a turn of three, a context of four, a turn of three."""
    sampled = np.array([True] * 3 + [False] * 4 + [True] * 3)
    return Rollout(
        prompt_ids=PROMPT,
        token_ids=np.arange(10, 20, dtype=np.int32),
        logprobs=np.where(sampled, -np.arange(10) / 10, 0).astype(np.float32),
        segments=(VersionSegment(0, 0, 10),),
        finish_reason="stop",
        completion="",
        reward=reward,
        sampled=sampled,
        new_rows=rows,
    )


def rated(made: Rollout) -> Rollout:
    """Two tokens of a teacher at each position, which tell where they belong."""
    ids = (np.arange(10)[:, None] * 10 + np.arange(2)).astype(np.int32)
    logprobs = -ids.astype(np.float32)
    return dataclasses.replace(made, teacher_top_ids=ids, teacher_top_logprobs=logprobs)


def groups(rows: tuple[tuple[int, int], ...], is_rated: bool = False) -> list[RolloutGroup]:
    made = (rollout(0.0, rows), rollout(1.0), rollout(2.0, rows))
    of_group = tuple(rated(r) for r in made) if is_rated else made
    return [RolloutGroup(i, "", of_group, "http://a") for i in range(2)]


def plan(batch: list[RolloutGroup], **settings) -> StepPlan:
    return plan_step(
        batch, dataclasses.replace(GRPO(), **settings), version=0, num_ranks=2, row_len=16,
        local_batch_size=1, max_new_tokens=10, balance=True, cost=token_cost, row_bucket=1,
    )  # fmt: skip


def test_each_context_begins_a_sequence_with_what_the_server_was_sent():
    first, second = sequences_of(rollout(1.0, ((3, 4),)), sample_id=5, loss_weight=0.5)
    assert (first.prompt_ids.tolist(), first.completion_ids.tolist()) == ([2, 3], [10, 11, 12])
    assert second.prompt_ids.tolist() == [13, 14, 15, 16]
    assert second.completion_ids.tolist() == [17, 18, 19]
    assert {(s.sample_id, s.loss_weight) for s in (first, second)} == {(5, 0.5)}
    assert (first.num_trained, second.num_trained) == (3, 3)
    assert longest_sequence(2, 10, [(3, 4)]) == 7
    assert longest_sequence(2, 10, []) == 12


def test_columns_are_divided_as_the_completion_is():
    first, second = sequences_of(rated(rollout(1.0, ((3, 4),))))
    assert first.columns["teacher_top_ids"].tolist() == [[0, 1], [10, 11], [20, 21]]
    assert second.columns["teacher_top_ids"].tolist() == [[70, 71], [80, 81], [90, 91]]
    assert second.columns["teacher_top_logprobs"].tolist() == [[-70, -71], [-80, -81], [-90, -91]]
    (whole,) = sequences_of(rollout(1.0))
    assert not whole.columns


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_a_rollout_weighs_as_much_in_several_rows_as_in_one(aggregation):
    whole, split = (plan(groups(rows), aggregation=aggregation) for rows in ((), ((3, 4),)))
    assert (len(whole.sequences), len(split.sequences)) == (6, 10)
    assert (len(whole.samples), len(split.samples)) == (6, 6)
    assert split.minibatch_tokens == whole.minibatch_tokens
    assert (split.mass, split.num_trained_tokens) == (whole.mass, whole.num_trained_tokens)
    for field in ("loss_weights", "generator_logprobs"):
        sums = []
        for made in (whole, split):
            of_sample = torch.zeros(6)
            for rows in made.rows_of_rank:
                trained = rows.loss_mask
                of_sample.scatter_add_(0, rows.sample_ids[trained], getattr(rows, field)[trained])
            sums.append(of_sample)
        torch.testing.assert_close(*sums)


def test_parts_that_are_joined_keep_their_places():
    segments = (VersionSegment(0, 0, 4),)
    part = Generation(
        np.arange(4, dtype=np.int32), np.zeros(4, np.float32), "stop", segments, new_rows=((1, 2),)
    )
    whole = joined(joined(part, part), part)
    assert whole.new_rows == ((1, 2), (5, 2), (9, 2))
    assert without_contexts(whole.token_ids, whole.new_rows).tolist() == [0, 3] * 3
