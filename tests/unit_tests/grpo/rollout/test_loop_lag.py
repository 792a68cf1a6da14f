# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.rollout.loop_lag import LagWindow, LoopLag

P50, P99, LONGEST = (f"rollout/loop_lag_{name}_ms" for name in ("p50", "p99", "max"))


def test_percentiles_are_of_all_looks_and_the_longest_is_of_the_last_ones():
    window = LagWindow(interval_seconds=1.0, window_seconds=101.0)
    for hundredths in range(101):
        window.add(hundredths / 100)
    assert window.take_metrics() == pytest.approx({P50: 500.0, P99: 990.0, LONGEST: 1000.0})
    window.add(0.25)
    metrics = window.take_metrics()
    assert metrics[LONGEST] == pytest.approx(250.0)
    assert metrics[P99] == pytest.approx(990.0)


def test_a_standstill_counts_as_many_looks_as_were_missed():
    window = LagWindow(interval_seconds=1.0, window_seconds=100.0)
    window.add(3.5)
    assert window.take_metrics() == pytest.approx({P50: 2000.0, P99: 3470.0, LONGEST: 3500.0})


def test_old_looks_leave_the_window():
    window = LagWindow(interval_seconds=1.0, window_seconds=10.0)
    window.add(5.0)
    window.take_metrics()
    for _ in range(10):
        window.add(0.0)
    assert window.take_metrics() == {P50: 0.0, P99: 0.0, LONGEST: 0.0}


def test_a_standstill_longer_than_the_window_fills_it_and_no_more():
    window = LagWindow(interval_seconds=1.0, window_seconds=10.0)
    window.add(1e9)
    metrics = window.take_metrics()
    assert metrics[LONGEST] == 1e12
    assert metrics[P50] > 1e12 - 11e3


def test_what_comes_early_is_not_late():
    window = LagWindow(interval_seconds=1.0, window_seconds=10.0)
    window.add(-0.5)
    assert window.take_metrics() == {P50: 0.0, P99: 0.0, LONGEST: 0.0}


def test_without_a_look_there_is_nothing_to_say():
    assert LoopLag().take_metrics() == {}


@given(standstills=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=20))
def test_percentiles_are_what_events_at_random_moments_would_wait(standstills: list[float]):
    interval = 1 / 64
    window = LagWindow(interval, window_seconds=1000.0)
    waits: list[float] = []
    for late in standstills:
        window.add(late)
        # One event in each interval until the loop goes on.
        waits += [late - i * interval for i in range(int(late / interval) + 1)]
    metrics = window.take_metrics()
    waits.sort()
    assert waits[(len(waits) - 1) // 2] <= metrics[P99] / 1e3 + 1e-9
    assert metrics[P50] <= metrics[P99] <= metrics[LONGEST] + 1e-9
    # Interpolated between two of them, of which one is longer.
    assert sum(wait > metrics[P99] / 1e3 + 1e-9 for wait in waits) <= 0.01 * len(waits) + 1


async def _lags(block_seconds: float, num_looks: int) -> dict[str, float]:
    """Of a loop that is blocked once and then idle for some looks."""
    lag = LoopLag(interval_seconds=0.001)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(block_seconds)
    for _ in range(num_looks):
        await asyncio.sleep(0.001)
    metrics = lag.take_metrics()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return metrics


def test_a_blocked_loop_shows():
    metrics = asyncio.run(_lags(block_seconds=0.3, num_looks=3))
    assert metrics[LONGEST] >= 290
    # Nearly all of its time the loop stood still.
    assert metrics[P50] >= 100


def test_an_idle_loop_does_not():
    blocked = asyncio.run(_lags(block_seconds=0.3, num_looks=3))
    idle = asyncio.run(_lags(block_seconds=0.0, num_looks=50))
    assert idle[P50] < blocked[P50]
