"""Rows hold what their docstring draws."""

import numpy as np
import torch

from torchtitan.grpo.data.rows import NO_SAMPLE, Sample, build_rows


def sample(prompt, completion, logprobs, **weights):
    return Sample(
        np.array(prompt, np.int32),
        np.array(completion, np.int32),
        np.array(logprobs, np.float32) if logprobs is not None else None,
        **weights,
    )


def packed():
    samples = [
        sample([5, 6], [7, 8], [-1, -2], sample_id=1, loss_weight=0.25),
        sample([3], [4], [-3], sample_id=0, loss_weight=0.5),
        sample([9], [2, 1], None, ptx_weight=0.125),
    ]
    return build_rows(samples, [[0, 1], [2], []], 8)


def test_rows_are_aligned_to_the_predicted_token():
    rows = packed()
    assert rows.tokens[0].tolist() == [5, 6, 7, 8, 3, 4, 0, 0]
    assert rows.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert rows.sequence_ids[0].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert rows.labels[0].tolist() == [6, 7, 8, 0, 4, 0, 0, 0]
    assert rows.loss_mask[0].tolist() == [False, True, True, False, True, False, False, False]
    assert rows.generator_logprobs[0].tolist() == [0, -1, -2, 0, -3, 0, 0, 0]
    assert rows.loss_weights[0].tolist() == [0, 0.25, 0.25, 0, 0.5, 0, 0, 0]
    assert rows.sample_ids[0].tolist() == [1, 1, 1, 1, 0, 0, NO_SAMPLE, NO_SAMPLE]
    assert not rows.ptx_weights[0].any()


def test_a_teacher_s_divergence_stands_at_the_predicted_token():
    mask = np.array([True, False, True])
    divergence = np.array([0.5, 9.0, -0.25], np.float32)
    rated = sample([5, 6], [7, 8, 9], [-1, 0, -2], sample_id=0, sampled=mask, teacher_kl=divergence)
    rows = build_rows([rated, sample([3], [4], [-3], sample_id=1)], [[0, 1]], 8)
    assert rows.teacher_kl[0].tolist() == [0, 0.5, 0, -0.25, 0, 0, 0, 0]
    assert not packed().teacher_kl.any()


def test_supervised_tokens_have_a_weight_and_no_sample():
    rows = packed()
    assert rows.labels[1].tolist() == [2, 1, 0, 0, 0, 0, 0, 0]
    assert rows.ptx_weights[1].tolist() == [0.125, 0.125, 0, 0, 0, 0, 0, 0]
    assert not rows.loss_mask[1].any()
    assert not rows.loss_weights[1].any()
    assert (rows.sample_ids[1] == NO_SAMPLE).all()


def test_without_a_prompt_the_first_completion_token_is_not_predicted():
    alone = sample([], [4, 5, 6], None, ptx_weight=0.5)
    assert alone.num_predicted == 2
    rows = build_rows([sample([1], [2], [-1.0], sample_id=0), alone], [[0, 1]], 6)
    assert rows.labels[0].tolist() == [2, 0, 5, 6, 0, 0]
    assert rows.ptx_weights[0].tolist() == [0, 0, 0.5, 0.5, 0, 0]


def test_what_an_environment_put_in_is_context_alone():
    mask = np.array([True, False, False, True])
    mixed = sample([5], [7, 8, 9, 4], [-1, 0, 0, -2], sample_id=0, loss_weight=0.5, sampled=mask)
    assert (mixed.num_predicted, mixed.num_trained) == (4, 2)
    rows = build_rows([mixed], [[0]], 6)
    assert rows.tokens[0].tolist() == [5, 7, 8, 9, 4, 0]
    assert rows.labels[0].tolist() == [7, 8, 9, 4, 0, 0]
    assert rows.loss_mask[0].tolist() == [True, False, False, True, False, False]
    assert rows.loss_weights[0].tolist() == [0.5, 0, 0, 0.5, 0, 0]
    assert rows.generator_logprobs[0].tolist() == [-1, 0, 0, -2, 0, 0]


def test_an_empty_row_is_padding_alone():
    rows = packed()
    assert rows.positions[2].tolist() == list(range(8))
    assert not rows.sequence_ids[2].any()
    assert not rows.loss_mask[2].any()
    assert (rows.sample_ids[2] == NO_SAMPLE).all()


def test_advantages_are_looked_up_by_sample_and_stand_on_trained_tokens_alone():
    rows = packed().with_advantages(np.array([2.0, -0.5], np.float32))
    assert rows.advantages[0].tolist() == [0, -0.5, -0.5, 0, 2, 0, 0, 0]
    assert not rows.advantages[1:].any()
    assert rows.advantages.dtype == torch.float32


def test_rows_without_any_sample_take_an_empty_table():
    rows = build_rows([], [[]], 4).with_advantages(np.zeros(0, np.float32))
    assert rows.advantages.tolist() == [[0, 0, 0, 0]]


def test_microbatches_are_consecutive_rows():
    rows = packed()
    assert [part.num_rows for part in rows.microbatches(1)] == [1, 1, 1]
    assert torch.equal(rows.microbatches(2)[0].tokens, rows.tokens[:2])
    assert torch.equal(rows.microbatches(2)[1].sample_ids, rows.sample_ids[2:])
