"""The planner lays a run's batches out as its settings say."""

import numpy as np
import pytest

from torchtitan.grpo.data.planner import StepPlanner
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment

SEQ_LEN = 64


def rollout(length):
    return Rollout(
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.full(length - 2, 3, np.int32),
        generator_logprobs=np.zeros(length - 2, np.float32),
        segments=(VersionSegment(0, 0, length - 2),),
        finish_reason="stop",
        completion="",
        reward=1.0,
    )


@pytest.fixture
def plan(repository):
    model = read_hf_model(repository / "assets/reverse_digits/model")

    def make(lengths, **prompts):
        config = JobConfig()
        config.training.seq_len = SEQ_LEN
        config.training.local_batch_size = 1
        for key, value in prompts.items():
            setattr(config.prompts, key, value)
        group = RolloutGroup(0, "", tuple(map(rollout, lengths)), "")
        return StepPlanner(config, model).plan([group], step=0, version=0, num_ranks=2)

    return make


def tokens_of_ranks(made):
    return [int((rows.sample_ids >= 0).sum()) for rows in made.rows_of_rank]


def test_the_model_s_operations_are_balanced_unless_tokens_are(plan):
    # One of 60 tokens costs more than six of 10, by the attention that they lack.
    lengths = [60, *[10] * 6]
    by_tokens = plan(lengths, balance_cost="tokens")
    assert tokens_of_ranks(by_tokens) == [60, 60]
    assert by_tokens.metrics["data/max_over_mean_cost"] == 1
    by_flops = plan(lengths)
    assert by_flops.metrics["data/max_over_mean_cost"] > 1
    long_rank = max(by_flops.rows_of_rank, key=lambda rows: int(rows.positions.max()))
    # The rank of least cost comes first.
    assert long_rank is by_flops.rows_of_rank[1]


def test_without_balance_rows_are_packed_first(plan):
    lengths = [40, 24, 20, 20]
    assert tokens_of_ranks(plan(lengths, balance_batch=False, balance_cost="tokens")) == [64, 40]
    assert sorted(tokens_of_ranks(plan(lengths, balance_cost="tokens"))) == [44, 60]


def test_rows_come_in_buckets(plan):
    made = plan([40, 24, 20, 20], row_bucket=4)
    assert [rows.num_rows for rows in made.rows_of_rank] == [4, 4]
    assert made.metrics["data/rows_per_rank"] == 4
    assert made.metrics["data/padding_fraction"] == pytest.approx(1 - 104 / (2 * 4 * SEQ_LEN))
