"""Rows hold what their docstring draws; plans weigh every sample once."""

import numpy as np
import torch

from torchtitan.grpo.data.plan import plan_step
from torchtitan.grpo.data.rows import Sample, build_rows
from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment


def sample(prompt, completion, logprobs, advantage=1.0):
    return Sample(
        np.array(prompt, np.int32), np.array(completion, np.int32),
        np.array(logprobs, np.float32), advantage,
    )  # fmt: skip


def test_rows_are_aligned_to_the_predicted_token():
    samples = [sample([5, 6], [7, 8], [-1, -2], 0.5), sample([3], [4], [-3], -0.25)]
    rows = build_rows(samples, [[0, 1], []], 8)
    assert rows.tokens[0].tolist() == [5, 6, 7, 8, 3, 4, 0, 0]
    assert rows.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert rows.sequence_ids[0].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert rows.labels[0].tolist() == [6, 7, 8, 0, 4, 0, 0, 0]
    assert rows.loss_mask[0].tolist() == [False, True, True, False, True, False, False, False]
    assert rows.generator_logprobs[0].tolist() == [0, -1, -2, 0, -3, 0, 0, 0]
    assert rows.advantages[0].tolist() == [0, 0.5, 0.5, 0, -0.25, 0, 0, 0]
    assert not rows.loss_mask[1].any()
    assert [m.num_rows for m in rows.microbatches(1)] == [1, 1]
    assert torch.equal(rows.microbatches(1)[0].tokens, rows.tokens[:1])


def rollout(reward, version, length=3):
    ids = np.arange(length, dtype=np.int32)
    return Rollout(
        prompt_ids=np.array([1, 2], np.int32), completion_ids=ids,
        generator_logprobs=-ids.astype(np.float32),
        segments=(VersionSegment(version, 0, length),), finish_reason="stop",
        completion="", reward=reward,
    )  # fmt: skip


def test_a_plan_counts_tokens_ages_and_leaves_unscored_samples_out():
    groups = [
        RolloutGroup(4, "a", (rollout(1.0, 6), rollout(0.0, 7), rollout(None, 0)), "u"),
        RolloutGroup(9, "b", (rollout(2.0, 7, length=5), rollout(2.0, 7)), "u"),
    ]
    plan = plan_step(
        groups, version=7, num_ranks=2, row_len=10, local_batch_size=1, advantage_eps=1e-6
    )
    assert plan.num_trained_tokens == 3 + 3 + 5 + 3
    assert plan.num_tokens == plan.num_trained_tokens + 4 * 2
    assert plan.metrics["staleness/max_steps"] == 1
    assert plan.metrics["staleness/mean_steps"] == 0.25
    assert sum(int(rows.loss_mask.sum()) for rows in plan.rows_of_rank) == 14
    advantages = torch.cat([rows.advantages[rows.loss_mask] for rows in plan.rows_of_rank])
    assert sorted({round(x, 3) for x in advantages.tolist()}) == [-0.707, 0.0, 0.707]
    assert 0 < plan.metrics["data/padding_fraction"] < 1
