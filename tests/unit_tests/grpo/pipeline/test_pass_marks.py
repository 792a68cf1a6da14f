# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the time of a step's passes was spent on, and which rank was the slowest."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from torchtitan.grpo.pipeline.pass_marks import PassMarks, PassTimes, compared, timed


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def marks(now: list[float]) -> PassMarks:
    marks = PassMarks(torch.device("cpu"))
    marks._clock = SimpleNamespace(mark=lambda: now[0], seconds=lambda begin, end: end - begin)
    return marks


class Spends(nn.Module):
    def __init__(self, now: list[float], seconds: float) -> None:
        super().__init__()
        self._now, self._seconds, self.linear = now, seconds, nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._now[0] += self._seconds
        return self.linear(inputs)


def test_parts_last_from_mark_to_mark_and_the_time_between_steps_is_no_part(now, marks):
    for part, seconds in [
        ("forward", 1),
        ("backward", 2),
        ("forward", 4),
        ("", 100),
        ("optimizer", 8),
    ]:
        marks.mark(part)
        now[0] += seconds
    marks.mark("")
    now[0] += 50
    assert marks.take() == PassTimes(Counter(forward=5, backward=2, optimizer=8))
    assert marks.take() == PassTimes()


def test_only_watched_blocks_and_losses_are_own_work(now, marks):
    model = nn.Sequential(Spends(now, 1.0), Spends(now, 2.0))
    marks.watch(model)
    inputs = torch.ones(2)
    model(inputs)  # scores rows, which is not compared
    with marks.watching():
        now[0] += 10  # such as a wait for parameters
        model[0](inputs)
        now[0] += 10
        model[1](inputs)
    with marks.own(""):
        now[0] += 4
    model(inputs)
    assert marks.take() == PassTimes(own=7.0)


def test_blocks_that_are_computed_again_in_the_backward_pass_are_watched_once(now, marks):
    block = Spends(now, 1.0)
    marks.watch([block])
    with marks.watching():
        output = checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False)
    output.sum().backward()
    assert (now[0], marks.take().own) == (2.0, 1.0)


def test_compiled_blocks_are_watched():
    marks = PassMarks(torch.device("cpu"))
    block = torch.compile(nn.Linear(2, 2), backend="eager", fullgraph=True)
    marks.watch([block])  # pyright: ignore[reportArgumentType]
    with marks.watching():
        block(torch.ones(2))
    assert marks.take().own > 0


def test_one_rank_waits_for_no_other():
    times = PassTimes(Counter(forward=3.0, backward=5.0, optimizer=1.0), own=2.0)
    assert times.divided([2.0]) == {"forward": 3.0, "backward": 5.0, "optimizer": 1.0, "ranks": 0.0}
    assert compared([2.0]) == {}


def test_two_ranks_of_unequal_work_wait_for_the_slower_one():
    times = PassTimes(Counter(forward=4.0, backward=4.0, optimizer=1.0), own=1.0)
    divided = times.divided([1.0, 3.0])
    assert divided == pytest.approx(
        {"forward": 8 / 3, "backward": 8 / 3, "ranks": 8 / 3, "optimizer": 1.0}
    )
    assert sum(divided.values()) == pytest.approx(9.0)
    assert compared([1.0, 3.0]) == {"ranks/slowest": 1.0, "ranks/slowest_factor": 1.5}
    assert compared([1.0, 1.0, 1.0, 4.0]) == {"ranks/slowest": 3.0, "ranks/slowest_factor": 4.0}


def test_ranks_of_a_pipeline_also_wait_where_all_have_equal_work(now, marks):
    marks.mark("pipeline")
    for kind in ("F", "B", "F", "B"):
        with timed(0, kind, 0, None, marks):
            now[0] += 1.0
        now[0] += 1.5  # for the other stage
    marks.mark("")
    times = marks.take()
    assert times == PassTimes(Counter(forward=2.0, backward=2.0), own=4.0, pipeline=10.0)
    divided = times.divided([4.0, 4.0])
    assert divided == pytest.approx(
        {"forward": 2.0, "backward": 2.0, "ranks": 6.0, "optimizer": 0.0}
    )


def test_a_critic_beside_the_policy_adds_to_its_times(now, marks):
    for _ in ("policy", "critic"):
        marks.mark("forward")
        with marks.own(""):
            now[0] += 1
        marks.mark("backward")
        now[0] += 2
        marks.mark("")
    times = PassTimes()
    times.add(marks.take())
    times.add(PassTimes(Counter(optimizer=1.0), own=1.0))  # of a further reduction
    assert times == PassTimes(Counter(forward=2.0, backward=4.0, optimizer=1.0), own=3.0)


def test_without_marks_nothing_is_measured():
    with timed(0, "F", 0, None, None):
        pass
    nothing = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "ranks": 0.0}
    assert PassTimes().divided([0.0]) == PassTimes().divided([0.0, 0.0]) == nothing
    assert compared([0.0, 0.0]) == {}
