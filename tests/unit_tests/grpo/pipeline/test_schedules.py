# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Each schedule's row says what torch's schedule does."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torchtitan.config.job_config import Parallelism

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.pipeline.schedule_builder import build_schedule
from torchtitan.grpo.pipeline.schedules import SCHEDULES, schedule_named, schedules_with
from torchtitan.grpo.pipeline.split import _PLACED_LIKE
from torchtitan.grpo.pipeline.stages import ends_one_at_a_time, num_stages, stage_ranks


class StageOnPaper:
    """The attributes of a stage that torch reads when it lays out a schedule."""

    group_rank, group, is_first, is_last, has_backward = 0, None, True, False, True

    def __init__(self, degree: int, index: int, count: int) -> None:
        self.group_size, self.stage_index, self.num_stages = degree, index, count
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.device, self.submod = torch.device("cpu"), nn.Identity()


def settings_of(name: str, degree: int) -> Parallelism:
    return Parallelism(pipeline_parallel_degree=degree, pipeline_parallel_schedule=name)


def torch_schedule(name: str, degree: int, num_microbatches: int) -> Any:
    """Torch's schedule as it is built on pipeline rank 0, with the row's number of stages."""
    total = num_stages(settings_of(name, degree), num_layers=64)
    held = [i for i, rank in enumerate(stage_ranks(settings_of(name, degree), total)) if rank == 0]
    config = JobConfig()
    config.parallelism = settings_of(name, degree)
    config.training.local_batch_size = num_microbatches
    stages: Any = [StageOnPaper(degree, index, total) for index in held]
    return build_schedule(config, stages, loss=lambda *_: 0)


def single_actions(actions: list[Any]) -> list[Any]:
    """The actions of a rank in order, without idle places; overlapped ones one by one."""
    return [single for action in actions if action for single in action.sub_actions or [action]]


def last_stage_actions(schedule: Any, last: int) -> list[str]:
    return [
        action.computation_type.name
        for actions in schedule.pipeline_order.values()
        for action in single_actions(actions)
        if action.stage_index == last
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_row_names_a_class_that_takes_as_many_stages(name):
    row = SCHEDULES[name]
    assert issubclass(row.load_class(), PipelineScheduleSingle) == (
        row.stages_per_rank == 1 and not row.allows_more_stages
    )
    assert row.name == name == type(torch_schedule(name, 2, 4)).__name__.removeprefix("Schedule")


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_lie_where_torch_expects_them(name, degree):
    schedule = torch_schedule(name, degree, 8)
    total = num_stages(settings_of(name, degree), num_layers=64)
    ranks = stage_ranks(settings_of(name, degree), total)
    for rank, actions in schedule.pipeline_order.items():
        stages = {action.stage_index for action in single_actions(actions)}
        assert stages == {stage for stage, holder in enumerate(ranks) if holder == rank}
    # Upstream splits the model by the name of a schedule with the same placement.
    like = SCHEDULES[_PLACED_LIKE[SCHEDULES[name].placement]]
    assert like.placement == SCHEDULES[name].placement


def test_the_two_placements_are_those_of_their_definition():
    assert stage_ranks(settings_of("Interleaved1F1B", 3), 6) == [0, 1, 2, 0, 1, 2]
    assert stage_ranks(settings_of("ZBVZeroBubble", 3), 6) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_number_of_microbatches_is_refused_where_torch_refuses_it(name, degree):
    for count in range(1, 14):
        problem = SCHEDULES[name].microbatch_problem(count, degree)
        try:
            torch_schedule(name, degree, count)
        except ValueError as error:
            assert problem is not None, f"{count} microbatches: {error}"
        else:
            assert problem is None, f"{count} microbatches: {problem}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_zero_bubble_schedule_splits_the_backward_pass(name):
    actions = last_stage_actions(
        torch_schedule(name, 2, 8), num_stages(settings_of(name, 2), num_layers=64) - 1
    )
    assert ("BACKWARD_WEIGHT" in actions) == SCHEDULES[name].is_zero_bubble


@pytest.mark.parametrize(("degree", "count"), [(2, 4), (2, 8), (4, 8), (4, 16)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_row_says_whether_the_last_stage_ends_one_microbatch_at_a_time(name, degree, count):
    last = num_stages(settings_of(name, degree), num_layers=64) - 1
    begun, most, ends = 0, 0, ("FULL_BACKWARD", "BACKWARD_WEIGHT")
    for action in last_stage_actions(torch_schedule(name, degree, count), last):
        begun += (action == "FORWARD") - (action in ends)
        most = max(most, begun)
    assert begun == 0
    assert ends_one_at_a_time(settings_of(name, degree)) == (most == 1)
    assert ends_one_at_a_time(settings_of(name, 1))


def test_stages_must_be_as_many_as_the_row_allows():
    assert [n for n in range(1, 9) if SCHEDULES["1F1B"].allows_stages(n, 2)] == [2]
    assert [n for n in range(1, 9) if SCHEDULES["ZBVZeroBubble"].allows_stages(n, 2)] == [4]
    assert [n for n in range(1, 9) if SCHEDULES["Interleaved1F1B"].allows_stages(n, 2)] == [4, 6, 8]


def test_an_unknown_schedule_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"one of GPipe, 1F1B, .*got 'DualPipe'"):
        schedule_named("DualPipe")


def test_a_split_backward_pass_refuses_compile():
    able = schedules_with("compile")
    assert able == [row.name for row in SCHEDULES.values() if not row.is_zero_bubble]
    assert "1F1B" in able and "ZBVZeroBubble" not in able
