# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from torchtitan.grpo.observe.rank_monitor import Phases


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_is_stuck_after_the_bound_and_three_times_its_longest():
    clock = Clock()
    phases = Phases(stuck_seconds=10.0, clock=clock)
    phases.enter("training")
    clock.now += 10.0
    assert phases.health({}).problem is None
    clock.now += 1.0
    problem = phases.health({}).problem
    assert problem is not None and "'training' has lasted 11 s, more than 10 s" in problem
    phases.enter("waiting")
    phases.complete(7)
    assert phases.health({}).facts["step"] == 7
    phases.enter("training")  # which has lasted 11 s before
    clock.now += 32.0
    assert phases.health({}).problem is None
    clock.now += 2.0
    assert phases.health({}).status == "stuck"
