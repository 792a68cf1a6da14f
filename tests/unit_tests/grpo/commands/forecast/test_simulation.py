# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A simulated run keeps the rules of a real one."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from torchtitan.grpo.commands.forecast.lend_forecast import LendingSimulation
from torchtitan.grpo.commands.forecast.search import Plan, Split, simulate
from torchtitan.grpo.commands.forecast.simulation import Simulation
from torchtitan.grpo.commands.forecast.system import Lengths, scaled
from torchtitan.grpo.rollout.lending.scheduler import LendScheduler, Lent

SETTINGS = [
    {},
    {"max_head_offpolicyness": 0},
    {"max_head_offpolicyness": 5, "num_servers": 5},
    {"stream": True, "stream_parts": 3},
    {"async_weight_update": False},
    {"dropped": 0.3},
    {"num_lent": 2},
    {"num_servers": 0, "num_lent": 2, "max_head_offpolicyness": 0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_batch_is_whole_and_no_sample_too_old(changed, settings) -> None:
    system = changed(**settings)
    run = (LendingSimulation if system.num_lent else Simulation)(system, seed=3)
    outcome = run.run(10)
    assert outcome.max_age <= system.rollout.max_head_offpolicyness
    assert run.totals["samples"] == run.version * system.batch_completions
    in_flight = sum(server.load for server in run.servers) + len(run.homeless)
    assert run.in_flight == in_flight <= system.rollout.max_concurrent_rollouts
    running = itertools.chain(run.homeless, *(server.cut() for server in run.servers))
    held = {completion.group_id for completion in running}
    assert held <= set(run.groups), "no completion runs for a group that has ended"
    parts = (outcome.trained, outcome.waited, outcome.pushed, outcome.lent)
    assert sum(parts) == pytest.approx(1.0, abs=0.02)
    assert 0 <= outcome.busy <= 1


def test_a_seed_decides_everything(system) -> None:
    assert simulate(system, 1) == simulate(system, 1)
    assert simulate(system, 1) != simulate(system, 2)


def test_twice_the_speed_is_twice_the_samples(system) -> None:
    names = ("token", "beside", "train", "train_token", "push", "reward")
    half = {name: getattr(system.costs, name) / 2 for name in names}
    fast = replace(system, costs=replace(system.costs, **half))
    ratio = simulate(fast).samples_per_second / simulate(system).samples_per_second
    assert ratio == pytest.approx(2.0, rel=1e-6)


def test_more_servers_do_no_harm(changed) -> None:
    rates = []
    for number in (1, 2, 4, 8, 16):
        system = changed(num_servers=number, max_concurrent_rollouts=32 * number)
        runs = [simulate(system, seed).samples_per_second for seed in range(4)]
        rates.append((np.mean(runs), np.std(runs)))
    for (before, _), (after, noise) in itertools.pairwise(rates):
        assert after > before - 2 * noise
    assert rates[-1][0] > 1.5 * rates[0][0]


def test_a_synchronous_step_takes_what_can_be_calculated(changed) -> None:
    system = changed(
        max_head_offpolicyness=0, num_servers=1, prompt_tokens=10.0, reward=0.5,
        lengths=Lengths.lognormal(100.0, 0.0),
    )  # fmt: skip
    costs = system.costs
    completions = system.batch_completions
    generate = 100 * (costs.token + completions * costs.beside)
    train = costs.train + completions * 110 * costs.train_token
    step = simulate(system).step_seconds
    assert step == pytest.approx(costs.push + generate + costs.reward + train, rel=1e-3)


def test_a_trainer_that_is_the_bottleneck_never_waits(changed) -> None:
    outcome = simulate(changed(train_token=0.1))
    assert outcome.trained == pytest.approx(1.0, abs=1e-6)


def test_lending_gains_where_training_waits_for_servers(changed) -> None:
    long = {"max_new_tokens": 4000, "lengths": Lengths.lognormal(2000.0, 0.2)}
    short_of_room = {"num_servers": 1, "max_concurrent_rollouts": 16, "max_running": 16, **long}
    alone = simulate(changed(**short_of_room))
    lending = {"num_lent": 1, "room": 0.1, "wake": 0.5, "sleep": 0.1}
    lent = simulate(changed(**short_of_room | {"max_concurrent_rollouts": 32}, **lending))
    assert lent.samples_per_second > 1.2 * alone.samples_per_second
    assert lent.lent > 0.1 and lent.lent_tokens > 0.1


def test_devices_are_back_before_each_training_step(changed, monkeypatch) -> None:
    run = LendingSimulation(changed(num_servers=0, num_lent=2), seed=0)
    seen = Counter()
    train = run.train

    def watched() -> None:
        seen[run.lent] += 1
        assert not any(server.is_awake for server in run.servers)
        train()

    monkeypatch.setattr(run, "train", watched)
    run.run(5)
    assert set(seen) == {Lent.NO} and seen[Lent.NO] >= 5


def test_a_step_of_lent_devices_takes_what_can_be_calculated(changed, monkeypatch) -> None:
    """Training begins when the servers sleep, which is all that is late."""
    system = changed(
        max_head_offpolicyness=0, num_servers=0, num_lent=1, prompt_tokens=10.0, reward=0.0,
        lengths=Lengths.lognormal(100.0, 0.0), room=0.5, wake=2.0, sleep=0.25,
    )  # fmt: skip
    costs, late = system.costs, []
    observe = LendScheduler.observe_step

    def watched(scheduler, seconds, late_seconds, *others) -> None:
        late.append(late_seconds)
        observe(scheduler, seconds, late_seconds, *others)

    monkeypatch.setattr(LendScheduler, "observe_step", watched)
    generate = 100 * (costs.token + system.batch_completions * costs.beside)
    train = costs.train + system.batch_completions * 110 * costs.train_token
    step = simulate(system).step_seconds
    assert step == pytest.approx(0.5 + 2.0 + generate + 0.25 + train, rel=1e-3)
    assert late == pytest.approx([0.25] * len(late))


def test_a_push_costs_the_same_from_either_side(changed) -> None:
    system = changed(push=0.5, transfer=0.3, num_servers=4)
    few, many = Plan(system, Split(4, 4)), Split(1, 4)
    moved = few.on(many)
    assert (moved.costs.push, moved.costs.transfer) == pytest.approx((0.5 + 3 * 0.3, 4 * 0.3))
    back = Plan(moved, many).on(few.split)
    assert (back.costs.push, back.costs.transfer) == pytest.approx((0.5, 0.3))


def test_ten_thousand_devices_take_few_events(changed) -> None:
    big = changed(
        prompts_per_step=2048, group_size=16, num_servers=9000, max_concurrent_rollouts=9000 * 16
    )
    outcome = simulate(big)
    assert outcome.num_events < 20_000
    small, factor = scaled(big)
    assert factor * small.batch_completions == big.batch_completions
    assert outcome.max_age <= 2


LARGE = {
    "prompts_per_step": 128,
    "num_servers": 16,
    "max_concurrent_rollouts": 1024,
    "train_token": 6e-6,
}


@pytest.mark.parametrize("age", [0, 2])
def test_a_smaller_system_stands_for_a_large_one(changed, age: int) -> None:
    large = changed(**LARGE, max_head_offpolicyness=age)
    small, factor = scaled(large, most=128)
    assert factor == 4.0 and small.num_servers == 4
    seeds = range(3)
    whole = np.mean([Simulation(large, s).run(8).samples_per_second for s in seeds])
    part = np.mean([Simulation(small, s).run(8, factor).samples_per_second for s in seeds])
    assert part == pytest.approx(whole, rel=0.08)


def test_a_server_that_stands_for_a_part_of_one_keeps_its_speed(changed) -> None:
    """One server cannot be divided: each completion stands for several."""
    large = changed(prompts_per_step=256, num_servers=1, max_concurrent_rollouts=1024)
    small, factor = scaled(large, most=64)
    assert small.costs.beside == pytest.approx(factor * large.costs.beside)
    part = Simulation(small, 0).run(6, factor).samples_per_second
    assert part == pytest.approx(Simulation(large, 0).run(6).samples_per_second, rel=0.1)


def test_lengths_beyond_the_old_limit_are_continued() -> None:
    random = np.random.default_rng(0)
    true = random.exponential(100, 4000).astype(int) + 1
    ended = true[true < 80]
    found = Lengths.measured(ended.tolist(), 1 - len(ended) / len(true), 80)
    assert found.mean(80) == pytest.approx(np.minimum(true, 80).mean(), rel=0.01)
    assert found.mean(400) == pytest.approx(np.minimum(true, 400).mean(), rel=0.1)
    drawn = [n for _ in range(500) for n in found.draw(random, 8, 400)]
    assert np.mean(drawn) == pytest.approx(found.mean(400), rel=0.1)
