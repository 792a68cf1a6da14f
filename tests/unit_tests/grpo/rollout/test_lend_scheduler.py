# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The invariants of `lending/scheduler.py`, with random servers, costs and losses in virtual time."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lend_world import TICK, Plan, World

from torchtitan.grpo.rollout.lending.scheduler import Decision, LendScheduler, Lent, Moment

MAX_LATE = 0.05
FORGOTTEN = 0.01
AWAY = (Lent.WAKING, Lent.AWAKE)


class Checked(LendScheduler):
    """Checks every decision against what a moment alone allows."""

    def __init__(self, max_late: float = MAX_LATE) -> None:
        super().__init__(max_late)
        self.lent_at: list[Moment] = []

    def decide(self, moment: Moment) -> Decision:
        decision = super().decide(moment)
        for other in (replace(moment, is_full=True), replace(moment, lent=Lent.NO)):
            super().decide(other)
        assert super().decide(moment) is decision, "asking has changed the decision"
        check(moment, decision)
        if decision is Decision.LEND:
            at_once = replace(moment, lent=Lent.WAKING, since=moment.now)
            assert super().decide(at_once) is Decision.STAY, "lent only to be taken back"
            self.lent_at.append(moment)
        return decision


def check(moment: Moment, decision: Decision) -> None:
    is_wanted = moment.asked_at is not None and not moment.is_full
    is_alone = moment.other_rate == 0
    if decision is Decision.LEND:
        assert is_wanted and moment.lent is Lent.NO and moment.lent_rate != 0
        assert is_alone or moment.movable_groups > 0
    if decision is Decision.TAKE_BACK:
        assert moment.lent in AWAY
        assert not (is_wanted and is_alone), "nobody else would fill the batch"
    if moment.lent in AWAY:
        is_useless = not is_alone and (moment.movable_groups == 0 or moment.lent_rate == 0)
        if not is_wanted or is_useless:
            assert decision is Decision.TAKE_BACK
    elif moment.lent is Lent.NO and is_alone and is_wanted and moment.lent_rate != 0:
        if moment.since < moment.asked_at:
            assert decision is Decision.LEND


plans = st.builds(
    Plan,
    seed=st.integers(0, 2**32),
    groups_per_batch=st.integers(1, 16),
    staleness=st.integers(0, 2),
    in_order=st.booleans(),
    other_slots=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    lent_slots=st.integers(1, 6),
    group_seconds=st.sampled_from([0.5, 2.0, 8.0]),
    spread=st.sampled_from([0.0, 0.3, 1.0]),
    train_seconds=st.sampled_from([0.5, 3.0, 12.0]),
    room=st.sampled_from([0.0, 0.2, 1.0]),
    wake=st.sampled_from([0.2, 1.0, 5.0]),
    sleep=st.sampled_from([0.2, 1.0, 5.0]),
    noise=st.sampled_from([0.0, 0.5]),
)


def most_hoped(scheduler: Checked) -> float:
    """The most seconds that a lending can have been expected to save, with those forgotten."""
    return max(
        (m.missing_groups / m.other_rate + FORGOTTEN * m.now for m in scheduler.lent_at if m.other_rate),
        default=0.0,
    )  # fmt: skip


def check_delays(world: World, scheduler: Checked) -> None:
    """In any span of steps, the delays are a share of its time, but for a constant."""
    plan = world.plan
    round_trip = (plan.room + plan.wake + plan.sleep) * (1 + plan.noise)
    over, worst = 0.0, 0.0
    for delay, step in zip(world.delays, world.steps, strict=True):
        over = max(over + delay - MAX_LATE * step, 0.0)
        worst = max(worst, over)
    assert worst <= round_trip + most_hoped(scheduler) + max(world.delays) + 1e-6


def check_switching(world: World, scheduler: Checked) -> None:
    """Between two lendings of one wait, the devices are back for as long as a lending costs."""
    plan = world.plan
    least = (plan.room + plan.wake + plan.sleep) * (1 - plan.noise)
    for earlier, later in zip(scheduler.lent_at, scheduler.lent_at[1:], strict=False):
        if earlier.asked_at == later.asked_at and world.num_wakes:
            assert later.now - later.since >= least - TICK


@settings(max_examples=120, deadline=None)
@given(plan=plans, loss_seconds=st.sampled_from([0.0, 10.0, 100.0]))
def test_every_run_goes_on_and_delays_are_bounded(plan, loss_seconds):
    scheduler = Checked()
    world = World(replace(plan, loss_seconds=loss_seconds), scheduler)
    world.run(12)
    check_delays(world, scheduler)


@settings(max_examples=60, deadline=None)
@given(plan=plans, loss_seconds=st.sampled_from([0.0, 30.0]))
def test_a_run_without_other_servers_lends_once_for_each_batch(plan, loss_seconds):
    scheduler = Checked()
    world = World(replace(plan, other_slots=(), loss_seconds=loss_seconds), scheduler)
    world.run(8)
    waits = [moment.asked_at for moment in scheduler.lent_at]
    assert len(waits) == len(set(waits))
    assert sum(world.late) <= 8 * ((plan.wake + plan.sleep) * (1 + plan.noise) + 3 * TICK)


@settings(max_examples=100, deadline=None)
@given(plan=plans)
def test_lending_never_slows_a_run_down_by_more_than_its_share(plan):
    scheduler = Checked()
    world, without = World(plan, scheduler), World(plan, None)
    seconds, seconds_without = world.run(25), without.run(25)
    first = (2 * plan.room + plan.wake + plan.sleep) * (1 + plan.noise)
    print(seconds/seconds_without, seconds-seconds_without, first)
    assert seconds <= seconds_without * (1 + MAX_LATE + FORGOTTEN) + first + 2 * plan.group_seconds
