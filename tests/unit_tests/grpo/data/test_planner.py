"""The planner lays a run's batches out as its settings say; parts of a batch add up to it."""

import numpy as np
import pytest
from rollouts import group, rollout

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.cost import token_cost
from torchtitan.grpo.data.planner import StepPlanner
from torchtitan.grpo.data.replay import split_groups
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.types import BatchPart, RolloutGroup

VERSION = 5


@pytest.fixture
def planner(repository):
    model = read_hf_model(repository / "assets/reverse_digits/model")

    def make(seq_len: int = 48, local_batch_size: int = 2, **settings) -> StepPlanner:
        config = JobConfig()
        config.training.seq_len, config.training.local_batch_size = seq_len, local_batch_size
        for key, value in settings.items():
            tables = (config.prompts, config.grpo, config.parallelism, config.compile)
            setattr(next(table for table in tables if hasattr(table, key)), key, value)
        return StepPlanner(config, model)

    return make


def test_the_model_s_operations_are_balanced_unless_tokens_are(planner):
    # One of 60 tokens costs more than six of 10, by the attention that they lack.
    groups = [group(0, *(rollout(n - 2) for n in (60, *[10] * 6)))]

    def plan(*, by_tokens: bool = False, **settings):
        made = planner(64, 1, share_contexts=False, **settings)
        if by_tokens:
            made._cost = token_cost
        return made.plan(groups, step=0, version=0, num_ranks=2).plan

    by_tokens, by_flops = plan(by_tokens=True), plan()
    assert [int((r.sample_ids >= 0).sum()) for r in by_tokens.rows_of_rank] == [60, 60]
    assert by_tokens.metrics["data/max_over_mean_cost"] == 1
    assert by_flops.metrics["data/max_over_mean_cost"] > 1
    # The rank of least cost comes first.
    longest = [int(rows.positions.max()) for rows in by_flops.rows_of_rank]
    assert longest[1] == max(longest) > longest[0]
    # Without balance, rows are packed first.
    groups = [group(0, *(rollout(n - 2) for n in (40, 24, 20, 20)))]
    for settings, tokens in ({"balance_batch": False}, [64, 40]), ({}, [44, 60]):
        rows = plan(by_tokens=True, **settings).rows_of_rank
        assert [int((r.sample_ids >= 0).sum()) for r in rows] == tokens


def test_microbatches_are_whole_only_where_their_shape_must_not_change(planner):
    groups = [group(0, *(rollout(30) for _ in range(3)))]

    def num_rows(**settings) -> int:
        settings |= {"share_contexts": False}
        made = planner(local_batch_size=2, **settings).plan(groups, step=0, version=0, num_ranks=1)
        return made.plan.rows_of_rank[0].num_rows

    assert num_rows() == 3
    assert num_rows(packed_attention="flex") == 4
    assert num_rows(enable=True) == num_rows(pipeline_parallel_degree=2) == 4


def groups_of(seed: int, num_groups: int) -> list[RolloutGroup]:
    random = np.random.default_rng(seed)

    def one(group_id: int):
        # Every third group is without an advantage.
        reward = None if random.random() < 0.1 else float(group_id % 3 and random.normal())
        return rollout(int(random.integers(1, 30)), reward, 0, int(random.integers(3, VERSION + 1)))

    return [group(i, *(one(i) for _ in range(4))) for i in range(num_groups)]


def plan_all(planner: StepPlanner, parts):
    last = len(parts) - 1
    return [
        planner.plan(
            groups, part=BatchPart.at(begins_batch=i == 0, ends_batch=i == last), step=VERSION,
            version=VERSION, num_ranks=2,
        )
        for i, groups in enumerate(parts)
    ]  # fmt: skip


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
@pytest.mark.parametrize("filtered", [False, True])
def test_weights_of_parts_by_their_masses_are_those_of_the_whole_step(
    planner, aggregation, filtered
):
    groups = groups_of(1, 7)
    split = split_groups(groups, 3)
    assert [len(part) for part in split] == [3, 3, 1]
    settings = {"aggregation": aggregation, "filter_zero_advantage": filtered}
    (whole,) = plan_all(planner(**settings), [groups])
    parts = plan_all(planner(**settings), split)
    total = sum(part.plan.mass for part in parts)
    assert total == whole.plan.mass > 0
    weights = [s.loss_weight * p.plan.mass / total for p in parts for s in p.plan.sequences]
    expected = [sample.loss_weight for sample in whole.plan.sequences]
    np.testing.assert_allclose(weights, expected, rtol=1e-12)


def test_metrics_of_parts_are_the_whole_steps(planner):
    groups = groups_of(2, 6)
    (whole,) = plan_all(planner(filter_zero_advantage=True), [groups])
    parts = plan_all(planner(filter_zero_advantage=True), split_groups(groups, 3))
    of_plan = {k: whole.metrics[k] for k in whole.plan.metrics}
    assert of_plan == pytest.approx(whole.plan.metrics)
    assert [part.metrics for part in parts[:-1]] == [{}, {}]
    metrics = parts[-1].metrics
    # Each part is packed and balanced by itself.
    own = {
        "data/rows_per_rank", "data/padding_fraction", "data/max_over_mean_cost",
        "time/shared_tokens_fraction",
    }  # fmt: skip
    assert {k: v for k, v in metrics.items() if k not in own} == pytest.approx(
        {k: v for k, v in whole.metrics.items() if k not in own}
    )
    rows = sum(part.plan.metrics["data/rows_per_rank"] for part in parts)
    assert metrics["data/rows_per_rank"] == rows >= whole.metrics["data/rows_per_rank"]
    computed, tokens = (
        sum(of(part.plan) for part in parts)
        for of in (lambda plan: plan.num_computed, lambda plan: plan.num_tokens)
    )
    assert metrics["data/padding_fraction"] == pytest.approx(1 - computed / (rows * 2 * 48))
    assert 0 < metrics["time/shared_tokens_fraction"] == pytest.approx(1 - computed / tokens)


def test_a_step_that_starts_again_forgets_the_parts_that_had_arrived(planner):
    made, groups = planner(), groups_of(3, 4)
    for some, part in ((groups[:2], "FIRST"), (groups[3:], "FIRST"), (groups[:1], "LAST")):
        made.plan(some, part=BatchPart[part], step=0, version=VERSION, num_ranks=1)
    assert [planned.group_id for planned in made.groups] == [0, 3]
