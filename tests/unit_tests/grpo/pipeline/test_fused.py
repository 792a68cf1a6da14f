# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One pass of a pipeline trains a policy and a critic as two passes do, and takes less time."""

from dataclasses import replace

import pytest

from torchtitan.grpo.config.grpo import Critic
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.pipeline.schedules import LAYER_SCHEDULES, SCHEDULES
from torchtitan.grpo.pipeline.stages import trains_together
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.fused import fuse, opposite
from torchtitan.grpo.pipeline.tables.gaps import fill_gaps
from torchtitan.grpo.pipeline.tables.simulate import simulate

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7], [3, 1, 4, 1, 5]]
ROWS = [[i % len(SEQUENCES)] for i in range(8)]


def tables_of(name: str, ranks: int, microbatches: int, times=(1.0, 2.0, 0.8)):
    row = SCHEDULES[name]
    costs = Costs.uniform(ranks, row.stages_per_rank, times, hop=0.02)
    table = row.make_table(ranks, microbatches, costs)
    return table, opposite(table) if row.turns_second else table, costs


@pytest.mark.parametrize("name", [name for name in LAYER_SCHEDULES if name != "auto"])
def test_one_pass_is_shorter_than_two_and_holds_one_microbatch_more(name):
    for ranks, microbatches in ((2, 3), (4, 8)):
        first, second, costs = tables_of(name, ranks, microbatches)
        both = Costs(2 * costs.stages, costs.hop)
        fused = fuse(first, second, both)
        found, alone = simulate(fused, both), simulate(first, costs)
        assert found.makespan < 0.97 * 2 * alone.makespan
        assert found.peak <= alone.peak + 1 + 1e-6


@pytest.mark.parametrize(
    ("ranks", "microbatches", "most"), [(2, 4, 0.8), (4, 8, 0.79), (8, 16, 0.79)]
)
def test_two_models_in_opposite_directions_hide_the_waiting_of_one_forward_one_backward(
    ranks, microbatches, most
):
    first, second, costs = tables_of("1F1B", ranks, microbatches)
    both = Costs(2 * costs.stages, costs.hop)
    two = 2 * simulate(first, costs).makespan
    makespan = simulate(fuse(first, second, both), both).makespan
    assert makespan <= most * two
    assert makespan < 0.95 * simulate(fuse(first, first, both), both).makespan, "one direction"


def test_other_rows_pass_through_the_first_model_in_what_is_left():
    first, second, costs = tables_of("1F1B", 4, 2)
    both = Costs(2 * costs.stages, costs.hop)
    fused = fuse(first, second, both)
    filled = fill_gaps(fused, both, 8)
    assert filled.num_gap_microbatches >= 2
    assert simulate(filled, both).makespan == pytest.approx(simulate(fused, both).makespan)
    stages = {a.stage for actions in filled.actions for a in actions if a.kind == "G"}
    assert stages == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_passes_that_recompute_before_their_gradient_arrives_are_not_deadlocked(name):
    for hop in (0.1, 0.5):
        first, second, costs = tables_of(name, 4, 2)
        stages = tuple(
            replace(stage, forward=part, input_grad=2 * part, recompute=part)
            for stage, part in zip(costs.stages, 2 * (1.0, 5.0, 1.0, 1.0), strict=False)
        )
        both = Costs(2 * stages, hop)
        two_passes = 2 * simulate(first, Costs(stages, hop)).makespan
        assert simulate(fuse(first, second, both), both).makespan < two_passes


def test_models_of_unequal_costs_are_fused_and_the_longer_one_decides():
    first, second, costs = tables_of("1F1B", 4, 8)
    small = [replace(stage, forward=0.1, input_grad=0.2, weight_grad=0.1) for stage in costs.stages]
    both = Costs((*costs.stages, *small), costs.hop)
    assert (
        simulate(fuse(first, second, both), both).makespan < 1.05 * simulate(first, costs).makespan
    )


def test_the_settings_decide_whether_one_pass_trains_both():
    def together(**changes) -> bool:
        config = JobConfig(critic=Critic())
        config.grpo.advantage = changes.pop("advantage", "gae")
        config.parallelism.pipeline_parallel_degree = changes.pop("degree", 2)
        config.parallelism.pipeline_parallel_schedule = changes.pop("schedule", "1F1B")
        for name, value in changes.items():
            setattr(config.grpo, name, value)
        return trains_together(config)

    assert together() and together(schedule="VHalf")
    assert not together(advantage="group_norm")
    assert not together(degree=1)
    assert not together(schedule="Helix")
    assert not together(pipeline_fill_gaps=False)
    assert not together(pipeline_offload=0.5)


@pytest.mark.parametrize(
    "cases",
    [
        [
            {"pp": 4, "schedule": "1F1B", "num_rows": 2, "ac": "full"},
            {"pp": 2, "dp_shard": 2, "schedule": "ZBVZeroBubble"},
        ],
        pytest.param(
            [
                {"pp": 2, "dp_shard": 2, "schedule": "Interleaved1F1B", "ac": "full"},
                {"pp": 2, "tp": 2, "schedule": "GPipe"},
                {"pp": 4, "schedule": "VMin"},
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["two cases", "more cases"],
)
def test_gradients_are_those_of_two_passes_also_with_other_work(cases, make_model, run_ranks):
    _, policy = make_model("qwen3_tied", num_hidden_layers=8, intermediate_size=78)
    results = run_ranks(
        "trained_together", 4, policy=policy, critic=policy, seq_len=12, sequences=SEQUENCES,
        rows=ROWS, cases=cases,
    )  # fmt: skip
    of_ranks = results[0]["results"]
    for number, case in enumerate(cases):
        found = [of_rank[number] for of_rank in of_ranks]
        for of_rank in found:
            assert of_rank["different"] == [] and of_rank["compared"] > 10
            assert of_rank["passes"] == [2, 1, 1, 1, 1]
            assert of_rank["units"] > 0 and of_rank["held"] == of_rank["losses"] == 0
        turns = SCHEDULES[case["schedule"]].turns_second
        assert any(one != other for one, other in (of_rank["first"] for of_rank in found)) == turns
        # Forward passes of other rows run in gaps that two models leave.
        in_gaps = {of_rank["done"][-1] for of_rank in found}
        assert in_gaps == ({2} if case["schedule"] == "1F1B" else {0}) or case["schedule"] == "VMin"
