# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A rollout of several rows is one sample: it weighs as much, and travels as it is."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import token_cost
from torchtitan.grpo.data.packing_list import packing_list, rows_from, sources_of
from torchtitan.grpo.data.record import RecordReader, RolloutRecorder, read_groups
from torchtitan.grpo.data.rollout_rows import sequences_of
from torchtitan.grpo.data.step_plan import StepPlan, plan_step
from torchtitan.grpo.rollout import group_frames
from torchtitan.grpo.rollout.completion_checks import longest_sequence
from torchtitan.grpo.rollout.joining import joined
from torchtitan.grpo.rollout.saved import SavedRollouts, UnfinishedGroup, read_saved, write_saved
from torchtitan.grpo.types import (
    Generation,
    PromptProgress,
    Rollout,
    RolloutGroup,
    TopTokens,
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
    return dataclasses.replace(made, teacher_top=TopTokens(ids, -ids.astype(np.float32)))


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


def test_a_teacher_s_tokens_are_divided_as_the_completion_is():
    first, second = sequences_of(rated(rollout(1.0, ((3, 4),))))
    assert first.teacher_top is not None and second.teacher_top is not None
    assert first.teacher_top.ids.tolist() == [[0, 1], [10, 11], [20, 21]]
    assert second.teacher_top.ids.tolist() == [[70, 71], [80, 81], [90, 91]]
    assert second.teacher_top.logprobs.tolist() == [[-70, -71], [-80, -81], [-90, -91]]
    (whole,) = sequences_of(rollout(1.0))
    assert whole.teacher_top is None


@pytest.mark.parametrize(
    ("tokens", "position", "logprob", "message"),
    [
        (9, 0, 0.0, r"Each of the 10 completion tokens must have .* got \(9, 2\)"),
        (10, 2, -np.inf, "must be finite"),
        (10, 9, np.nan, "must be finite"),
    ],
)
def test_tokens_of_a_teacher_that_fit_no_completion_are_refused(tokens, position, logprob, message):
    logprobs = np.zeros((tokens, 2), np.float32)
    logprobs[4] = np.nan  # a token of the context, which is not trained
    made = dataclasses.replace(rollout(1.0), teacher_top=None)
    top = TopTokens(np.zeros((tokens, 2), np.int32), logprobs)
    if tokens == 10:
        sequences_of(dataclasses.replace(made, teacher_top=top))
    logprobs[position, 1] = logprob
    with pytest.raises(ValueError, match=message):
        sequences_of(dataclasses.replace(made, teacher_top=top))


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


def test_a_rank_that_fetches_its_rollouts_lays_out_the_same_rows():
    batch = groups(((3, 4),), is_rated=True)
    made = plan(batch)
    assert made.top_k == 2
    flat = [r for group in batch for r in group.rollouts]
    for rows, expected in zip(made.layout, made.rows_of_rank, strict=True):
        where, weights = packing_list(rows, made.sequences, 10)
        fetched = [RolloutGroup(0, "", (flat[i],), "") for i in sources_of(where)]
        laid = rows_from(where, weights, fetched, num_rows=len(rows), row_len=16)
        assert laid.teacher_top_ids is not None
        for name, tensor in laid.tensors().items():
            assert torch.equal(tensor, expected.tensors()[name]), name


def test_rows_survive_processes_files_and_records(tmp_path: Path):
    made = groups(((3, 4),))
    headers, frames = group_frames.pack_groups(made)
    assert group_frames.unpack_groups(headers, frames)[0].rollouts[0].new_rows == ((3, 4),)
    sampled = np.ones(3, np.bool_)
    begun = Generation(
        np.ones(3, np.int32), np.zeros(3, np.float32), "stop", (VersionSegment(0, 0, 3),),
        sampled=sampled, new_rows=((1, 1),),
    )  # fmt: skip
    saved = SavedRollouts(1, PromptProgress(), unfinished=(UnfinishedGroup(0, 0, (), (begun,)),))
    write_saved(tmp_path / "x", saved)
    assert read_saved(tmp_path / "x", 1).unfinished[0].begun[0].new_rows == ((1, 1),)
    recorder = RolloutRecorder(str(tmp_path / "r.jsonl"), 128, 1.0, 0)
    recorder.write(0, PromptProgress(), made)
    recorder.close()
    ((_, batch),) = RecordReader(str(tmp_path / "r.jsonl"), 128, 1.0, "rollout.replay")
    assert read_groups(batch)[0].rollouts[0].new_rows == ((3, 4),)


def test_parts_that_are_joined_keep_their_places():
    segments = (VersionSegment(0, 0, 4),)
    part = Generation(
        np.arange(4, dtype=np.int32), np.zeros(4, np.float32), "stop", segments, new_rows=((1, 2),)
    )
    whole = joined(joined(part, part), part)
    assert whole.new_rows == ((1, 2), (5, 2), (9, 2))
    assert without_contexts(whole.token_ids, whole.new_rows).tolist() == [0, 3] * 3
