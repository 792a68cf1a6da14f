# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A clock that divides the time that passes among causes."""

import pytest

from torchtitan.grpo.system.cause_clock import CauseClock


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def clock(now: list[float]) -> CauseClock:
    return CauseClock("a", lambda: now[0])


def test_the_seconds_of_all_causes_are_the_time_that_has_passed(now, clock):
    now[0] += 1
    clock.enter("b")
    now[0] += 2
    with pytest.raises(ZeroDivisionError), clock.within("c"):
        now[0] += 4
        1 / 0  # noqa: B018
    assert clock.cause == "b"
    now[0] += 8
    clock.enter("b")
    now[0] += 16
    assert clock.take() == {"a": 1, "b": 26, "c": 4}


def test_each_moment_is_taken_once(now, clock):
    now[0] += 1
    assert clock.take() == {"a": 1}
    assert sum(clock.take().values()) == 0
    now[0] += 2
    assert clock.take() == {"a": 2}


def test_no_more_is_moved_than_there_is(now, clock):
    now[0] += 3
    assert clock.move(2, "a", "b") == 0
    assert clock.move(2, "a", "b") == 1
    assert clock.move(1, "unknown", "b") == 1
    assert {k: v for k, v in clock.take().items() if v} == {"b": 3}


def test_a_cause_is_divided_in_proportion(now, clock):
    now[0] += 6
    clock.divide("a", {"b": 1, "c": 2, "d": 0})
    clock.divide("unknown", {"b": 1})
    now[0] += 1
    assert clock.take() == {"b": 2, "c": 4, "d": 0, "a": 1}
    now[0] += 1
    clock.divide("a", {"b": 0.0})  # says nothing
    assert clock.take() == {"a": 1}
