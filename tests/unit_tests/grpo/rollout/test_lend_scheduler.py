# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The invariants of `lending/scheduler.py`, with random servers, costs and losses in virtual time."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lend_world import TICK, Plan, World

from torchtitan.grpo.rollout.lending.scheduler import Decision, LendScheduler, Lent, Moment

MAX_LATE = 0.05
FORGOTTEN = 0.005
AWAY = (Lent.WAKING, Lent.AWAKE)


class Checked(LendScheduler):
    """Checks every decision against what a moment alone allows."""

    def __init__(self, max_late: float = MAX_LATE) -> None:
        super().__init__(max_late)
        self.lent_at: list[Moment] = []
        self.measured: set[str] = set()
        self.measured_at: list[set[str]] = []  # for each of those lendings

    def observe_room(self, seconds: float) -> None:
        super().observe_room(seconds)
        self.measured.add("room")

    def observe_wake(self, seconds: float) -> None:
        super().observe_wake(seconds)
        self.measured.add("wake")

    def observe_sleep(self, seconds: float) -> None:
        super().observe_sleep(seconds)
        self.measured.add("sleep")

    def decide(self, moment: Moment) -> Decision:
        is_first = not self.lent_at and moment.asked_at == 0.0
        decision = super().decide(moment)
        for other in (replace(moment, is_full=True), replace(moment, lent=Lent.NO)):
            super().decide(other)
        assert super().decide(moment) is decision, "asking has changed the decision"
        check(moment, decision)
        if is_first and moment.movable_groups > 0 and moment.lent_rate != 0:
            assert decision is Decision.LEND, "the first batch measures"
        if decision is Decision.LEND:
            at_once = replace(moment, lent=Lent.WAKING, since=moment.now)
            assert super().decide(at_once) is Decision.STAY, "lent only to be taken back"
            self.lent_at.append(moment)
            self.measured_at.append(set(self.measured))
        return decision


def check(moment: Moment, decision: Decision) -> None:
    is_wanted = moment.asked_at is not None and not moment.is_full
    is_alone = moment.other_rate == 0
    if decision is Decision.LEND:
        assert is_wanted and moment.lent is Lent.NO and moment.lent_rate != 0
        assert is_alone or moment.movable_groups + moment.later_groups > 0
    if decision is Decision.TAKE_BACK:
        assert moment.lent in AWAY
        assert not (is_wanted and is_alone), "nobody else would fill the batch"
    if moment.lent in AWAY:
        num_lendable = moment.movable_groups + moment.later_groups
        is_useless = not is_alone and (num_lendable == 0 or moment.lent_rate == 0)
        if not is_wanted or is_useless:
            assert decision is Decision.TAKE_BACK
    can_lend = moment.lent is Lent.NO and is_wanted and moment.lent_rate != 0
    if can_lend and is_alone and moment.since < moment.asked_at:
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
    """In any span of steps, the delays are a share of its time, but for a constant.

    Without other servers, devices are lent whatever that costs.
    """
    plan = world.plan
    round_trip = (plan.room + plan.wake + plan.sleep) * (1 + plan.noise)
    alone = [moment.now for moment in scheduler.lent_at if moment.other_rate == 0]
    over, worst, end = 0.0, 0.0, 0.0
    for delay, step in zip(world.delays, world.steps, strict=True):
        begin, end = end, end + step
        if any(begin - TICK / 2 < now < end for now in alone):
            delay = 0.0
        over = max(over + delay - MAX_LATE * step, 0.0)
        worst = max(worst, over)
    assert worst <= round_trip + most_hoped(scheduler) + max(world.delays) + 1e-6


def check_switching(world: World, scheduler: Checked) -> None:
    """Between two lendings of one wait, the devices are back for as long as a lending costs.

    What was not measured before the second one counts as free.
    """
    plan, lent_at = world.plan, scheduler.lent_at
    for i in range(1, len(lent_at)):
        if lent_at[i - 1].asked_at == lent_at[i].asked_at:
            known = sum(getattr(plan, cost) for cost in scheduler.measured_at[i])
            assert lent_at[i].now - lent_at[i].since >= known * (1 - plan.noise) - TICK


TAKEN_BACK_BEFORE_IT_WOKE = Plan(
    seed=4728, groups_per_batch=2, other_slots=(1,), lent_slots=1, group_seconds=2.0,
    spread=1.0, train_seconds=0.5, room=1.0, wake=0.2, sleep=0.2,
)  # fmt: skip
LENT_TWICE_WITHOUT_OTHER_SERVERS = Plan(
    seed=25438, groups_per_batch=2, other_slots=(1,), lent_slots=1, group_seconds=0.5,
    train_seconds=0.5, room=0.0, wake=1.0, sleep=5.0,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    plan=plans,
    loss_seconds=st.sampled_from([0.0, 10.0, 100.0]),
    lent_speed=st.sampled_from([1.0, 0.05]),
)
@example(plan=TAKEN_BACK_BEFORE_IT_WOKE, loss_seconds=10.0, lent_speed=1.0)
@example(plan=LENT_TWICE_WITHOUT_OTHER_SERVERS, loss_seconds=10.0, lent_speed=0.05)
def test_every_run_goes_on_and_delays_are_bounded(plan, loss_seconds, lent_speed):
    scheduler = Checked()
    plan = replace(plan, loss_seconds=loss_seconds, lent_speed=lent_speed)
    world = World(plan, scheduler)
    world.run(12)
    check_delays(world, scheduler)
    check_switching(world, scheduler)


@settings(max_examples=15, deadline=None)
@given(plan=plans, loss_seconds=st.sampled_from([0.0, 30.0]))
def test_a_run_without_other_servers_lends_once_for_each_batch(plan, loss_seconds):
    scheduler = Checked()
    world = World(replace(plan, other_slots=(), loss_seconds=loss_seconds), scheduler)
    world.run(8)
    waits = [moment.asked_at for moment in scheduler.lent_at]
    assert len(waits) == len(set(waits))
    assert sum(world.delays) == 0


@settings(max_examples=25, deadline=None)
@given(plan=plans)
def test_lending_never_slows_a_run_down_by_more_than_its_share(plan):
    world, without = World(plan, Checked()), World(plan, None)
    seconds, seconds_without = world.run(25), without.run(25)
    # The first batch tries lending out, and runs of few long groups differ by chance.
    first = (2 * plan.room + plan.wake + plan.sleep) * (1 + plan.noise)
    by_chance = 2 * plan.group_seconds * (1 + plan.spread)
    assert seconds <= seconds_without * (1 + MAX_LATE) + first + by_chance


EVEN = Plan(groups_per_batch=24, group_seconds=1.0, staleness=1)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("sleep", [0.2, 2.0])
@pytest.mark.parametrize("lent_slots", [1, 6])
@pytest.mark.parametrize("train_seconds", [4.0, 11.5, 30.0])
def test_even_work_reaches_most_of_the_bound_and_never_more(
    staleness, sleep, lent_slots, train_seconds
):
    plan = replace(EVEN, staleness=staleness, sleep=sleep)
    plan = replace(plan, lent_slots=lent_slots, train_seconds=train_seconds)
    scheduler = Checked()
    step, step_without = even_step(World(plan, scheduler)), even_step(World(plan, None))
    gained = step_without / step - 1
    possible = scheduler.bound(
        train_seconds, 24, other_rate=2.0, lent_rate=lent_slots, is_ahead=staleness > 0
    )
    # A step begins with a tick, and up to a group's time later than if work flowed.
    assert gained >= 0.8 * (possible - 1) - 0.5 * plan.group_seconds / step
    assert gained <= possible - 1 + 2 * TICK / step


@pytest.mark.parametrize("groups_per_batch", [4, 8])
def test_lent_servers_begin_later_batches_while_others_run_most_of_this_one(groups_per_batch):
    """The other server runs four groups at a time, and batches take groups in their order."""
    plan = Plan(groups_per_batch=groups_per_batch, other_slots=(4,), lent_slots=4, in_order=True)
    plan = replace(plan, train_seconds=1.0, staleness=1, group_seconds=6.0, spread=0.3)
    step, step_without = even_step(World(plan, Checked())), even_step(World(plan, None))
    assert step < 0.9 * step_without


def even_step(world: World) -> float:
    """Seconds of a step, without the first ones, which find no groups that were started before."""
    world.run(30)
    return sum(world.steps[5:]) / 25


def test_lending_goes_on_after_a_first_wake_that_was_slow():
    scheduler = Checked()
    world = World(replace(EVEN, first_wake_factor=20.0), scheduler)
    world.run(150)
    assert len({moment.asked_at for moment in scheduler.lent_at[-10:]}) == 10
    assert world.now - scheduler.lent_at[-10].now < 12 * EVEN.groups_per_batch / 2


@pytest.mark.parametrize("cost", [5.0, 9.0])
def test_lending_at_a_loss_is_tried_only_once_as_much_is_forgotten(cost):
    plan = replace(EVEN, wake=cost, sleep=cost)
    world, without = World(plan, Checked()), World(plan, None)
    seconds, seconds_without = world.run(200), without.run(200)
    loss = 2 * cost + 2 * plan.room - (plan.groups_per_batch / 2 - plan.train_seconds)
    assert 2 <= world.num_wakes <= 1 + FORGOTTEN * seconds / loss
    assert seconds <= seconds_without * (1 + 2 * FORGOTTEN) + 2 * cost


@pytest.mark.parametrize("sleep", [0.3, 0.5, 1.0, 2.0])
def test_devices_are_late_by_less_than_half_of_what_sleeping_takes(sleep):
    worlds = [World(replace(EVEN, sleep=sleep, spread=0.5, seed=i), Checked()) for i in range(3)]
    for world in worlds:
        world.run(25)
    late = [seconds for world in worlds for seconds in world.late]
    assert sum(late) / len(late) <= sleep / 2 + TICK


@pytest.mark.parametrize(("num_late", "decision"), [(1, Decision.LEND), (2, Decision.STAY)])
def test_quiet_steps_give_credit_for_one_round_trip(num_late, decision):
    """A round trip takes 4 s, a late lending 3 s, and the next one saves 1 s."""
    scheduler = LendScheduler(MAX_LATE)
    scheduler.observe_wake(2.0)
    scheduler.observe_sleep(1.0)
    scheduler.observe_room(1.0)
    scheduler.observe_step(0.0, 0.0, 1.0, 1.0)  # it was not late
    for _ in range(100):
        scheduler.observe_step(1000.0, 0.0, 0.0, 1.0)
    for _ in range(num_late):
        scheduler.observe_room(1.0)
        scheduler.observe_step(0.0, 2.0, 0.0, 1.0)
    moment = Moment(64.0, 32.0, False, 8, 8, Lent.NO, 16.0, 1.0, 1.0)
    assert 0 < scheduler.saving(moment) < 2
    assert scheduler.decide(moment) is decision


def test_lent_servers_take_over_when_the_others_are_lost():
    world = World(replace(EVEN, wake=30.0, sleep=30.0), Checked())
    world.run(10)
    num_wakes = world.num_wakes
    for server in world.servers:
        server.down_until = 0.0 if server.is_lent else math.inf
    world.run(15)
    assert world.num_wakes == num_wakes + 5


moments = st.builds(
    Moment,
    now=st.just(64.0),
    asked_at=st.sampled_from([None, 32.0, 60.0]),
    is_full=st.booleans(),
    missing_groups=st.integers(1, 40),
    movable_groups=st.integers(0, 40),
    lent=st.sampled_from(list(Lent)),
    since=st.sampled_from([16.0, 48.0, 63.0]),
    other_rate=st.sampled_from([None, 0.0, 0.25, 1.0, 4.0]),
    lent_rate=st.sampled_from([None, 0.0, 0.25, 1.0, 4.0]),
    later_groups=st.integers(0, 40),
)
seconds = st.sampled_from([0.0, 0.5, 1.0, 4.0, 16.0])
observed = st.tuples(seconds, seconds, seconds, seconds, seconds)


def taught(times: tuple[float, ...], scale: float = 1.0) -> Checked:
    room, wake, sleep, step, late = (scale * t for t in times)
    scheduler = Checked()
    scheduler.observe_room(room)
    scheduler.observe_wake(wake)
    scheduler.observe_sleep(sleep)
    scheduler.observe_step(step, late, 1.0, 4.0 / scale)
    scheduler.observe_step(2 * step, 0.0, 0.0, 4.0 / scale)
    return scheduler


def scaled(moment: Moment, scale: float) -> Moment:
    def rate(value: float | None) -> float | None:
        return None if value is None else value / scale

    asked_at = None if moment.asked_at is None else scale * moment.asked_at
    return replace(
        moment,
        now=scale * moment.now,
        asked_at=asked_at,
        since=scale * moment.since,
        other_rate=rate(moment.other_rate),
        lent_rate=rate(moment.lent_rate),
    )


@settings(max_examples=500, deadline=None)
@given(moment=moments, times=observed)
def test_decisions_follow_from_costs_and_not_from_a_scale(moment, times):
    moment = replace(moment, movable_groups=min(moment.movable_groups, moment.missing_groups))
    decision = taught(times).decide(moment)
    for scale in (2**-10, 2**10):
        assert taught(times, scale).decide(scaled(moment, scale)) is decision


@settings(max_examples=500, deadline=None)
@given(moment=moments, times=observed, more=st.integers(0, 3), larger=seconds)
def test_more_missing_work_or_less_cost_never_speaks_against_lending(moment, times, more, larger):
    """And what speaks for lending never makes it end."""
    moment = replace(moment, movable_groups=min(moment.movable_groups, moment.missing_groups))
    needier = replace(
        moment,
        missing_groups=moment.missing_groups + more,
        movable_groups=moment.movable_groups + more,
    )
    dearer = taught((times[0] + larger, times[1] + larger, times[2], *times[3:]))
    if moment.lent is Lent.NO and dearer.decide(moment) is Decision.LEND:
        assert taught(times).decide(needier) is Decision.LEND
    if moment.movable_groups and taught(times).decide(needier) is Decision.TAKE_BACK:
        assert taught(times).decide(moment) is Decision.TAKE_BACK


wanted = st.builds(
    Moment,
    now=st.just(64.0),
    asked_at=st.just(32.0),
    is_full=st.just(False),
    missing_groups=st.integers(1, 40),
    movable_groups=st.just(40),
    lent=st.just(Lent.NO),
    since=st.just(16.0),
    other_rate=st.sampled_from([0.25, 1.0, 4.0]),
    lent_rate=st.sampled_from([0.25, 1.0, 4.0]),
)


@settings(max_examples=500, deadline=None)
@given(moment=wanted, times=observed, movable=st.integers(1, 40))
def test_no_more_is_saved_than_lent_servers_can_do(moment, times, movable):
    scheduler, rate = taught((*times[:3], 0.0, 0.0)), moment.other_rate
    moment = replace(moment, movable_groups=min(movable, moment.missing_groups))
    room, wake, sleep = times[:3]
    started = rate * (room + wake)  # by the other servers, before a lent one is awake
    at_most_moved = max(0.0, moment.movable_groups - started) / rate
    at_most_waited = moment.missing_groups / rate - room - wake - sleep
    assert scheduler.saving(moment) <= min(at_most_moved, at_most_waited) - room + 1e-9
    unknown, same = replace(moment, lent_rate=None), replace(moment, lent_rate=rate)
    assert scheduler.decide(unknown) is scheduler.decide(same)


@settings(max_examples=500, deadline=None)
@given(moment=wanted, times=observed, movable=st.integers(0, 40), later=st.integers(1, 40))
def test_later_batches_save_what_lent_servers_have_time_for(moment, times, movable, later):
    scheduler, rate = taught((*times[:3], 0.0, 0.0)), moment.other_rate
    moment = replace(moment, movable_groups=min(movable, moment.missing_groups))
    without = scheduler.saving(moment)
    seconds = moment.missing_groups / rate - without - times[0]  # until this batch can begin
    trip, started = sum(times[:3]), rate * sum(times[:2])
    if moment.movable_groups == moment.missing_groups:
        shared = max(0.0, moment.missing_groups - rate * trip) / (rate + moment.lent_rate)
        assert seconds == pytest.approx(trip + shared)
    most = moment.lent_rate * max(0.0, seconds - trip)
    of_batch = max(0.0, moment.missing_groups - rate * seconds)
    for number in (later - 1, later):
        gained = scheduler.saving(replace(moment, later_groups=number)) - without
        left = max(0.0, moment.movable_groups + number - started - of_batch)
        assert -1e-9 <= gained <= min(number, most - of_batch, left) / rate + 1e-9
    more = scheduler.saving(replace(moment, later_groups=later))
    assert more >= scheduler.saving(replace(moment, later_groups=later - 1))
    if moment.movable_groups == 0 and later >= most + started:
        assert more == pytest.approx(without + most / rate)


@settings(max_examples=500, deadline=None)
@given(moment=wanted, times=observed, part=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_servers_that_wake_are_needed_as_long_as_all_goes_as_expected(moment, times, part):
    scheduler, rate = taught((*times[:3], 0.0, 0.0)), moment.other_rate
    room, wake, sleep = times[:3]
    begin = replace(
        moment, lent=Lent.WAKING, since=moment.now, movable_groups=moment.missing_groups
    )
    if begin.missing_groups <= rate * (room + wake + sleep):
        assert scheduler.decide(begin) is Decision.TAKE_BACK
    passed = part * (room + wake)
    later = replace(
        begin, now=begin.now + passed, missing_groups=begin.missing_groups - rate * passed
    )
    assert scheduler.decide(later) is scheduler.decide(begin)


@settings(max_examples=100, deadline=None)
@given(usual=seconds, last=seconds, kind=st.sampled_from(["room", "wake", "sleep"]))
def test_one_measurement_neither_replaces_those_before_nor_is_ignored(usual, last, kind):
    def saving(*measured: float) -> float:
        scheduler = LendScheduler(MAX_LATE)
        for cost in measured:
            getattr(scheduler, f"observe_{kind}")(cost)
        moment = Moment(64.0, 32.0, False, 400, 400, Lent.NO, 16.0, 1.0, 1.0)
        return scheduler.saving(moment)

    low, high = sorted([saving(usual, usual, usual), saving(last, last, last)])
    mixed = saving(usual, usual, last)
    assert low < mixed < high if usual != last else low == mixed == high


@settings(max_examples=300, deadline=None)
@given(moment=wanted, room=seconds, wake=seconds, sleep=seconds)
def test_only_delays_are_held_against_lending_until_time_has_passed(moment, room, wake, sleep):
    moment = replace(moment, movable_groups=moment.missing_groups)

    def after(*steps: tuple[float, float, float], max_late: float = MAX_LATE) -> Decision:
        """Each step has its seconds, those that it was late, and those that 4 groups a second saved."""
        scheduler = LendScheduler(max_late)
        scheduler.observe_wake(wake)
        scheduler.observe_sleep(sleep)
        for step, late, saved in steps:
            scheduler.observe_room(room)
            scheduler.observe_step(step, late, 4.0 * saved, 4.0)
        return scheduler.decide(moment)

    usual = after((1.0, 0.0, 1e6))
    much = moment.missing_groups / moment.other_rate + room + wake + sleep + 1.0
    late, good, saving = (0.0, much, 0.0), (1e6, 0.0, 1e6), (0.0, 0.0, 1e6)
    assert after(good, max_late=0.0) is after(good) is usual, (
        "what is left of the share is not spent"
    )
    assert after((0.0, much, much + room)) is usual, "what is saved is no delay"
    assert after((0.0, 2 * much, much)) is Decision.STAY, "half of it is saved"
    assert after(late) is after(good, late) is Decision.STAY
    assert after(late, saving) is Decision.STAY, "another step's saving"
    assert after(late, ((much + room) / MAX_LATE, 0.0, 1e6)) is usual, "the share has paid"
    if room:
        assert after(*[(0.0, 0.0, 0.0)] * math.ceil(much / room)) is Decision.STAY
