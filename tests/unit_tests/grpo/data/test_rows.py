"""Rows hold what their docstring draws; a rollout of several rows is one sample; ranks get their rows."""

import numpy as np
import pytest
import torch
from rollouts import rollout

from torchtitan.grpo.data.rows import NO_SAMPLE, Sample, TrainRows, build_rows, sequences_of
from torchtitan.grpo.rollout.completion_checks import longest_sequence
from torchtitan.grpo.training.scoring import with_top_k
from torchtitan.grpo.types import NO_TOKEN, Rollout, without_contexts


def sample(prompt, completion, logprobs, **weights):
    given = np.array(logprobs, np.float32) if logprobs is not None else None
    return Sample(np.array(prompt, np.int32), np.array(completion, np.int32), given, **weights)


def packed():
    samples = [
        sample([5, 6], [7, 8], [-1, -2], sample_id=1, loss_weight=0.25),
        sample([3], [4], [-3], sample_id=0, loss_weight=0.5),
        sample([9], [2, 1], None, ptx_weight=0.125),
    ]
    return build_rows(samples, [[0, 1], [2], []], 8)


def test_rows_are_aligned_to_the_predicted_token():
    rows = packed()
    expected = {
        "tokens": [5, 6, 7, 8, 3, 4, 0, 0],
        "positions": [0, 1, 2, 3, 0, 1, 0, 1],
        "reach": [4, 4, 4, 4, 6, 6, 8, 8],
        "sequence_ids": [0, 0, 0, 0, 1, 1, 2, 2],
        "labels": [6, 7, 8, 0, 4, 0, 0, 0],
        "loss_mask": [0, 1, 1, 0, 1, 0, 0, 0],
        "generator_logprobs": [0, -1, -2, 0, -3, 0, 0, 0],
        "loss_weights": [0, 0.25, 0.25, 0, 0.5, 0, 0, 0],
        "ptx_weights": [0] * 8,
        "sample_ids": [1, 1, 1, 1, 0, 0, NO_SAMPLE, NO_SAMPLE],
    }
    assert {name: getattr(rows, name)[0].tolist() for name in expected} == expected
    # Supervised tokens have a weight and no sample; an empty row is padding.
    assert rows.labels[1].tolist() == [2, 1, 0, 0, 0, 0, 0, 0]
    assert rows.ptx_weights[1].tolist() == [0.125, 0.125, 0, 0, 0, 0, 0, 0]
    assert not rows.loss_mask[1:].any() and not rows.loss_weights[1:].any()
    assert (rows.sample_ids[1:] == NO_SAMPLE).all() and not rows.sequence_ids[2].any()
    assert rows.positions[2].tolist() == list(range(8))


def test_a_supervised_sequence_has_weights_on_the_turns_that_are_learned():
    sampled = np.array([True, False, False, True])
    turns = sample([5], [7, 8, 9, 6], None, ptx_weight=0.5, sampled=sampled)
    alone = sample([], [7, 8, 9, 6], None, ptx_weight=0.5, sampled=sampled)
    rows = build_rows([turns, alone], [[0], [1]], 6)
    assert rows.ptx_weights.tolist() == [[0.5, 0, 0, 0.5, 0, 0], [0, 0, 0.5, 0, 0, 0]]
    assert rows.scored.tolist() == (rows.ptx_weights > 0).tolist()
    assert (turns.num_trained, alone.num_trained) == (2, 1)


def test_sequences_of_a_group_share_their_contexts_in_a_row():
    """Two share their prompt, of which a third shares the first token; a fourth is of another group."""
    of = {"sample_id": 0, "loss_weight": 0.5, "group": 7}
    samples = [
        sample([5, 6, 9], [7, 8], [-1, -2], **of),
        sample([5, 6, 9], [1], [-3], **(of | {"sample_id": 1})),
        sample([5, 4], [2], [-4], **(of | {"sample_id": 2})),
        sample([5, 6, 9], [3], [-5], sample_id=3, loss_weight=0.5, group=8),
    ]
    rows = build_rows(samples, [[0, 3, 1, 2]], 16)
    no = NO_SAMPLE
    expected = {
        "tokens":        [5,  6,  9, 7, 8, 9, 1, 4, 2, 5, 6, 9, 3, 0, 0, 0],
        "positions":     [0,  1,  2, 3, 4, 2, 3, 1, 2, 0, 1, 2, 3, 0, 1, 2],
        "reach":         [9,  7,  5, 5, 5, 7, 7, 9, 9, 13, 13, 13, 13, 16, 16, 16],
        "sequence_ids":  [0,  1,  2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5, 6, 6, 6],
        "labels":        [0,  0,  7, 8, 0, 1, 0, 2, 0, 6, 9, 3, 0, 0, 0, 0],
        "loss_mask":     [0,  0,  1, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0],
        "generator_logprobs": [0, 0, -1, -2, 0, -3, 0, -4, 0, 0, 0, -5, 0, 0, 0, 0],
        "sample_ids":    [no, no, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, no, no, no],
    }  # fmt: skip
    assert {name: getattr(rows, name)[0].tolist() for name in expected} == expected


def rated_rows() -> TrainRows:
    """A sample with two tokens of a teacher at each position, of which one is context, and others."""
    ids = np.array([[7, 1], [2, 3], [9, 4]], np.int32)
    columns = {
        "teacher_top_ids": ids,
        "teacher_top_logprobs": np.array([[-0.5, -1], [np.nan, 0], [-2, -3]], np.float32),
        "teacher_logprobs": np.array([-0.5, -9, -0.25], np.float32),
    }
    mask = np.array([True, False, True])
    rated = sample([5, 6], [7, 8, 9], [-1, 0, -2], sample_id=0, sampled=mask, columns=columns)
    alone = sample([3], [4], [-3], sample_id=1)
    whole = sample([3], [8], [-3], sample_id=2, columns={"teacher_top_ids": ids[:1, :1]})
    mixed_in = sample([9], [2, 1], None, ptx_weight=0.125)
    return build_rows([rated, alone, whole, mixed_in], [[0, 1], [3, 2]], 8)


def test_columns_stand_at_the_predicted_token_and_go_where_their_rows_go():
    whole, nothing = rated_rows(), [NO_TOKEN] * 2
    rows, expected = whole.columns, [nothing] * 8
    expected[1], expected[3] = [7, 1], [9, 4]
    assert rows["teacher_top_ids"][0].tolist() == expected
    assert rows["teacher_top_logprobs"][0].tolist() == [
        [0, 0], [-0.5, -1], [0, 0], [-2, -3], [0, 0], [0, 0], [0, 0], [0, 0]
    ]  # fmt: skip
    assert rows["teacher_top_ids"][1].tolist() == [*[nothing] * 3, [7, NO_TOKEN], *[nothing] * 4]
    ratings = rows["teacher_logprobs"]
    assert ratings[0, [1, 3]].tolist() == [-0.5, -0.25]
    assert ratings.isnan().sum() == ratings.numel() - 2
    assert not packed().columns
    there = whole.to(torch.device("cpu"))
    for part in (whole.select(slice(1, 2)), whole.microbatches(1)[1], there):
        assert part.columns.keys() == rows.keys()
        for name, tensor in part.columns.items():
            torch.testing.assert_close(tensor[-1], rows[name][1], equal_nan=True)


def test_rows_take_the_number_of_tokens_that_the_run_asks_for():
    rows = rated_rows()
    assert with_top_k(rows, 2).columns.keys() == rows.columns.keys()
    assert with_top_k(rows, 0).columns.keys() == {"teacher_logprobs"}
    unrated = with_top_k(packed(), 3).columns
    assert unrated["teacher_top_ids"].shape == unrated["teacher_top_logprobs"].shape == (3, 8, 3)
    assert (unrated["teacher_top_ids"] == NO_TOKEN).all()
    assert not unrated["teacher_top_logprobs"].any()
    with pytest.raises(ValueError, match=r"teacher.top_k \(3\) must be the number .* got 2"):
        with_top_k(rows, 3)


def test_the_host_keeps_the_reach_of_rows_on_a_device():
    rows = packed()
    on_device = rows.to(torch.device("meta"))
    assert on_device.reach.is_meta and on_device.tokens.is_meta
    for part in (on_device.select(slice(0, 2)), on_device.microbatches(2)[0]):
        assert torch.equal(part.host_reach, rows.reach[:2])
        assert torch.equal(part.host_mask, rows.host_mask[:2])


def test_without_a_prompt_the_first_completion_token_is_not_predicted():
    alone = sample([], [4, 5, 6], None, ptx_weight=0.5)
    assert alone.num_predicted == 2
    rows = build_rows([sample([1], [2], [-1.0], sample_id=0), alone], [[0, 1]], 6)
    assert rows.labels[0].tolist() == [2, 0, 5, 6, 0, 0]
    assert rows.ptx_weights[0].tolist() == [0, 0, 0.5, 0.5, 0, 0]


def test_advantages_are_looked_up_by_sample_and_stand_on_trained_tokens_alone():
    rows = packed().with_advantages(np.array([2.0, -0.5], np.float32))
    assert rows.advantages[0].tolist() == [0, -0.5, -0.5, 0, 2, 0, 0, 0]
    assert not rows.advantages[1:].any()
    assert rows.advantages.dtype == torch.float32
    empty = build_rows([], [[]], 4).with_advantages(np.zeros(0, np.float32))
    assert empty.advantages.tolist() == [[0, 0, 0, 0]]


def two_turns() -> Rollout:
    """Ten tokens: a turn of three, a context of four, a turn of three; rated by where each stands."""
    ids = (np.arange(10)[:, None] * 10 + np.arange(2)).astype(np.int32)
    sampled = np.array([True] * 3 + [False] * 4 + [True] * 3)
    return rollout(
        range(10, 20), sampled=sampled, new_rows=((3, 4),), teacher_top_ids=ids,
        teacher_top_logprobs=-ids.astype(np.float32),
    )  # fmt: skip


def test_each_context_begins_a_sequence_with_what_the_server_was_sent():
    first, second = sequences_of(two_turns(), sample_id=5, loss_weight=0.5)
    assert (first.prompt_ids.tolist(), first.completion_ids.tolist()) == ([1, 2], [10, 11, 12])
    assert second.prompt_ids.tolist() == [13, 14, 15, 16]
    assert second.completion_ids.tolist() == [17, 18, 19]
    assert {(s.sample_id, s.loss_weight) for s in (first, second)} == {(5, 0.5)}
    assert (first.num_trained, second.num_trained) == (3, 3)
    assert first.columns["teacher_top_ids"].tolist() == [[0, 1], [10, 11], [20, 21]]
    assert second.columns["teacher_top_ids"].tolist() == [[70, 71], [80, 81], [90, 91]]
    assert second.columns["teacher_top_logprobs"].tolist() == [[-70, -71], [-80, -81], [-90, -91]]
    assert (longest_sequence(2, 10, ((3, 4),)), longest_sequence(2, 10, ())) == (7, 12)
    assert without_contexts(np.arange(10), ((3, 4),)).tolist() == [0, 1, 2, 7, 8, 9]


def test_ranks_have_the_rows_of_their_coordinate_and_the_whole_table_sent_or_fetched(run_ranks):
    refusal = "it holds the batch of version 2, and the request is for version 0"
    for result in run_ranks("feed_ranks", 4):
        assert result["wrong"] == []
        assert refusal in result["refused"]
        assert result["signal"] == "STOP"
        assert result["total"] == 10
        assert result["metrics"].pop("norm of rank 0") == 5.0
        assert result["metrics"] == {"sum": -9, "mean": -3, "max": -2, "min": -4, "loss": -4.5}
