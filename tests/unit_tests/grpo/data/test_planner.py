"""The planner lays a run's batches out as its settings say; parts of a batch add up to it."""

import numpy as np
import pytest

from torchtitan.grpo.data.planner import StepPlanner
from torchtitan.grpo.data.replay import split_groups
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.types import BatchPart, Rollout, RolloutGroup, VersionSegment

SEQ_LEN = 64
VERSION = 5


def rollout(length):
    return Rollout(
        prompt_ids=np.array([1, 2], np.int32),
        token_ids=np.full(length - 2, 3, np.int32),
        logprobs=np.zeros(length - 2, np.float32),
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
        return StepPlanner(config, model).plan([group], step=0, version=0, num_ranks=2).plan

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


def aged_rollout(length: int, reward: float | None, version: int) -> Rollout:
    return Rollout(
        prompt_ids=np.array([1, 2], np.int32),
        token_ids=np.full(length, 3, np.int32),
        logprobs=np.zeros(length, np.float32),
        segments=(VersionSegment(version, 0, length),),
        finish_reason="stop",
        completion="",
        reward=reward,
    )


def groups_of(seed: int, num_groups: int) -> list[RolloutGroup]:
    random = np.random.default_rng(seed)
    return [
        RolloutGroup(
            group_id,
            "",
            tuple(
                aged_rollout(
                    int(random.integers(1, 30)),
                    # Every third group is without an advantage.
                    None if random.random() < 0.1 else float(group_id % 3 and random.normal()),
                    int(random.integers(3, VERSION + 1)),
                )
                for _ in range(4)
            ),
            "",
        )
        for group_id in range(num_groups)
    ]


@pytest.fixture
def planner(repository):
    model = read_hf_model(repository / "assets/reverse_digits/model")

    def make(**grpo) -> StepPlanner:
        config = JobConfig()
        config.training.seq_len = 48
        config.training.local_batch_size = 2
        for key, value in grpo.items():
            setattr(config.grpo, key, value)
        return StepPlanner(config, model)

    return make


def plan_all(planner: StepPlanner, parts):
    return [
        planner.plan(
            groups,
            part=BatchPart.at(begins_batch=index == 0, ends_batch=index == len(parts) - 1),
            step=VERSION,
            version=VERSION,
            num_ranks=2,
        )
        for index, groups in enumerate(parts)
    ]


def test_groups_are_split_in_order_and_the_last_part_is_what_is_left():
    groups = groups_of(0, 7)
    parts = split_groups(groups, 3)
    assert [len(part) for part in parts] == [3, 3, 1]
    assert [group for part in parts for group in part] == groups


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
@pytest.mark.parametrize("filtered", [False, True])
def test_weights_of_parts_by_their_masses_are_those_of_the_whole_step(
    planner, aggregation, filtered
):
    groups = groups_of(1, 7)
    settings = {"aggregation": aggregation, "filter_zero_advantage": filtered}
    (whole,) = plan_all(planner(**settings), [groups])
    parts = plan_all(planner(**settings), split_groups(groups, 3))
    total = sum(part.plan.mass for part in parts)
    assert total == whole.plan.mass > 0
    weights = [
        sample.loss_weight * part.plan.mass / total
        for part in parts
        for sample in part.plan.sequences
    ]
    expected = [sample.loss_weight for sample in whole.plan.sequences]
    np.testing.assert_allclose(weights, expected, rtol=1e-12)


def test_metrics_of_parts_are_the_whole_steps(planner):
    groups = groups_of(2, 6)
    (whole,) = plan_all(planner(filter_zero_advantage=True), [groups])
    parts = plan_all(planner(filter_zero_advantage=True), split_groups(groups, 3))
    assert whole.metrics == pytest.approx(whole.plan.metrics)
    assert [part.metrics for part in parts[:-1]] == [{}, {}]
    metrics = parts[-1].metrics
    assert metrics.keys() == whole.metrics.keys()
    for name in metrics:
        # Each part is packed and balanced by itself.
        if name not in ("data/rows_per_rank", "data/padding_fraction", "data/max_over_mean_cost"):
            assert metrics[name] == pytest.approx(whole.metrics[name]), name
    rows = sum(part.plan.metrics["data/rows_per_rank"] for part in parts)
    assert metrics["data/rows_per_rank"] == rows >= whole.metrics["data/rows_per_rank"]
    tokens = sum(part.plan.num_tokens for part in parts)
    assert metrics["data/padding_fraction"] == pytest.approx(1 - tokens / (rows * 2 * 48))


def test_a_step_that_starts_again_forgets_the_parts_that_had_arrived(planner):
    made = planner()
    groups = groups_of(3, 4)
    made.plan(groups[:2], part=BatchPart.FIRST, step=0, version=VERSION, num_ranks=1)
    made.plan(groups[3:], part=BatchPart.FIRST, step=0, version=VERSION, num_ranks=1)
    made.plan(groups[:1], part=BatchPart.LAST, step=0, version=VERSION, num_ranks=1)
    assert [group.group_id for group in made.groups] == [0, 3]
