# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When the rollout process counts as stuck, with a clock of the test's; and the lag of its loop."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.process_monitor import LoopLag, ProcessHealth
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher

P50, P99, LONGEST = (f"rollout/loop_lag_{name}_ms" for name in ("p50", "p99", "max"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FixedServer:
    """The part of a server that is read."""

    waits_for_devices, version, load, state = False, 3, 2, "ready"

    def __init__(self) -> None:
        self.ready = True

    def is_ready(self) -> bool:
        return self.ready


def opened(clock: Clock) -> tuple[ProcessHealth, Any, FixedServer]:
    server, health = FixedServer(), ProcessHealth(10.0, 60.0, clock)
    dispatcher: Any = Dispatcher([], Rollout(), vocab_size=8)
    dispatcher.servers["http://a:1"] = server
    session: Any = SimpleNamespace(
        dispatcher=dispatcher,
        producer=SimpleNamespace(is_asked=False, finished=range(4)),
        drops=DropLog(),
    )
    health.begin(session)
    return health, session, server


def test_starting_is_stuck_only_after_servers_had_their_time():
    clock = Clock()
    health = ProcessHealth(10.0, 60.0, clock)
    clock.now = 59.0
    assert health.health().facts["phase"] == "starting"
    assert health.health().problem is None
    assert health.metrics() == {}
    clock.now = 61.0
    assert health.health().problem is not None


def test_a_process_without_a_server_is_stuck_until_one_is_ready():
    clock = Clock()
    health, _, server = opened(clock)
    clock.now = 100.0
    assert health.health().problem is None  # the server is ready, and nobody asks
    server.ready = False
    health.note()
    clock.now = 111.0
    problem = health.health().problem
    assert problem is not None and "No server has been able to take work for 11 s" in problem
    server.waits_for_devices = True  # it is lent to the trainer, and comes back
    assert health.health().problem is None
    server.ready, server.waits_for_devices = True, False
    assert health.health().problem is None


def test_a_batch_for_which_nothing_ends_is_stuck_only_while_rank_0_waits():
    clock = Clock()
    health, session, _ = opened(clock)
    session.producer.is_asked = True
    for clock.now in (5.0, 10.0, 15.0):
        health.note()
    problem = health.health().problem
    assert problem is not None and "no completion has ended for 15 s" in problem
    session.dispatcher.attempts.num_tokens += 7
    assert health.health().problem is None
    clock.now = 30.0
    assert health.health().problem is not None
    session.producer.is_asked = False
    assert health.health().problem is None


def test_percentiles_are_of_the_window_and_the_longest_is_since_the_last_reading():
    lag = LoopLag(interval_seconds=1.0, window_seconds=101.0)
    assert lag.take_metrics() == {}
    for hundredths in range(101):
        lag.add(hundredths / 100)
    assert lag.take_metrics() == pytest.approx({P50: 500.0, P99: 990.0, LONGEST: 1000.0})
    lag.add(0.25)
    metrics = lag.take_metrics()
    assert metrics[LONGEST] == pytest.approx(250.0)
    assert metrics[P99] == pytest.approx(990.0)


@pytest.mark.parametrize(
    ("window", "lates", "p50", "longest"),
    [
        (100.0, [3.5], 2e3, 3.5e3),  # a standstill counts as the measurements that were missed
        (10.0, [5.0, *[0.0] * 10], 0.0, 5e3),  # old ones leave the window
        (10.0, [1e9], 1e12 - 5.5e3, 1e12),  # one longer than the window fills it and no more
        (10.0, [-0.5], 0.0, 0.0),  # early is not late
    ],
)
def test_a_standstill_counts_within_the_window(window, lates, p50, longest):
    lag = LoopLag(interval_seconds=1.0, window_seconds=window)
    for late in lates:
        lag.add(late)
    metrics = lag.take_metrics()
    assert (metrics[P50], metrics[LONGEST]) == (pytest.approx(p50), longest)


@pytest.mark.parametrize(("block_seconds", "bounds"), [(0.3, (290, 1e6)), (0.0, (0, 100))])
async def test_a_blocked_loop_lags_and_an_idle_one_does_not(block_seconds, bounds):
    lag = LoopLag(interval_seconds=0.001)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(block_seconds)
    await asyncio.sleep(0.03)
    task.cancel()
    await asyncio.wait({task})
    metrics = lag.take_metrics()
    assert bounds[0] <= metrics[LONGEST if block_seconds else P50] < bounds[1]
