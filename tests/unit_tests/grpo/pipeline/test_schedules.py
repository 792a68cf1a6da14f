# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Each schedule's row says what its table does."""

import pytest

from torchtitan.grpo.config.frame import Parallelism
from torchtitan.grpo.pipeline.schedules import LAYER_SCHEDULES, SCHEDULES
from torchtitan.grpo.pipeline.stages import ends_one_at_a_time, num_stages, schedule_of, stage_ranks
from torchtitan.grpo.pipeline.tables.actions import Costs, Table
from torchtitan.grpo.pipeline.tables.simulate import simulate


def settings_of(name: str, degree: int) -> Parallelism:
    return Parallelism(pipeline_parallel_degree=degree, pipeline_parallel_schedule=name)


def table_of(name: str, degree: int, microbatches: int, times=(1.0, 1.0, 1.0)) -> Table:
    row = SCHEDULES[name]
    costs = Costs.uniform(degree, row.stages_per_rank, times)
    return row.make_table(degree, microbatches, costs)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", LAYER_SCHEDULES)
def test_a_table_exists_for_every_number_of_microbatches(name, degree):
    row = SCHEDULES[name]
    for stages in (2, 3) if row.allows_more_stages else (row.stages_per_rank,):
        for microbatches in (1, 2, 3, 5, 8, 13):
            costs = Costs.uniform(degree, stages, (2, 3, 1), hop=0.1)
            table = row.make_table(degree, microbatches, costs)
            assert table.num_microbatches == microbatches
            simulate(table, costs)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", LAYER_SCHEDULES)
def test_stages_lie_where_the_table_expects_them_and_a_zero_bubble_one_splits_passes(name, degree):
    total = num_stages(settings_of(name, degree), num_layers=64)
    assert table_of(name, degree, 8).ranks == tuple(stage_ranks(settings_of(name, degree), total))
    kinds = {action.kind for actions in table_of(name, degree, 8).actions for action in actions}
    assert kinds == (set("FIW") if SCHEDULES[name].is_zero_bubble else set("FB"))


@pytest.mark.parametrize(("degree", "count"), [(2, 4), (2, 9), (4, 8)])
@pytest.mark.parametrize("name", LAYER_SCHEDULES)
def test_the_row_says_whether_the_last_stage_ends_one_microbatch_at_a_time(name, degree, count):
    for times in ((1, 1, 1), (3, 4, 2), (1, 2, 0.5)):
        table = table_of(name, degree, count, times)
        begun = most = 0
        for action in table.actions[table.ranks[-1]]:
            if action.stage == table.num_stages - 1:
                begun += (action.kind == "F") - (action.kind in "IB")
                most = max(most, begun)
        assert begun == 0
        assert SCHEDULES[name].finishes_each_microbatch == (most == 1)
        assert ends_one_at_a_time(settings_of(name, degree)) == (most == 1)
        assert ends_one_at_a_time(settings_of(name, 1))


def test_stages_must_be_as_many_as_the_row_allows():
    allowed = {"1F1B": [2], "ZBVZeroBubble": [4], "Interleaved1F1B": [4, 6, 8]}
    for name, counts in allowed.items():
        assert [n for n in range(1, 9) if SCHEDULES[name].allows_stages(n, 2)] == counts
    with pytest.raises(ValueError, match=r"one of GPipe, 1F1B, .*got 'DualPipe'"):
        schedule_of(settings_of("DualPipe", 2))
