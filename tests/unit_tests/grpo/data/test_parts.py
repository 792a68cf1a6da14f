# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Parts of a step: together they are the step, in numbers and in metrics."""

import numpy as np
import pytest

from torchtitan.grpo.data.parts import PartPlanner, split_groups
from torchtitan.grpo.data.planner import StepPlanner
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment

VERSION = 5


def rollout(length: int, reward: float | None, version: int) -> Rollout:
    return Rollout(
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.full(length, 3, np.int32),
        generator_logprobs=np.zeros(length, np.float32),
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
                rollout(
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

    def make(**grpo) -> PartPlanner:
        config = JobConfig()
        config.training.seq_len = 48
        config.training.local_batch_size = 2
        for key, value in grpo.items():
            setattr(config.grpo, key, value)
        return PartPlanner(StepPlanner(config, model))

    return make


def plan_all(planner: PartPlanner, parts):
    return [
        planner.plan(
            groups,
            is_first=index == 0,
            is_last=index == len(parts) - 1,
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


def test_a_step_that_begins_anew_forgets_what_had_come(planner):
    made = planner()
    groups = groups_of(3, 4)
    made.plan(groups[:2], is_first=True, is_last=False, step=0, version=VERSION, num_ranks=1)
    made.plan(groups[3:], is_first=True, is_last=False, step=0, version=VERSION, num_ranks=1)
    made.plan(groups[:1], is_first=False, is_last=True, step=0, version=VERSION, num_ranks=1)
    assert [group.group_id for group in made.groups] == [0, 3]
