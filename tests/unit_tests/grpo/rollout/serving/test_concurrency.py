# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import itertools
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.inference.client import ServerLoad
from torchtitan.grpo.rollout.serving.concurrency import ConcurrencyWindow

QUEUE = ServerLoad(running=8, waiting=50, kv_use=0.5)
FULL = ServerLoad(running=8, waiting=0, kv_use=0.95)
CALM = ServerLoad(running=8, waiting=0, kv_use=0.5)


def make(floor: int = 2, ceiling: int = 64, quota: int = 16) -> ConcurrencyWindow:
    return ConcurrencyWindow(floor=floor, ceiling=ceiling, quota=quota)


EVENTS = ["succeed"] * 8 + ["fail", "queue", "full", "calm", "unknown", "fill"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(EVENTS), max_size=300),
    st.integers(1, 8),
    st.integers(1, 64),
    st.integers(1, 100),
)
def test_the_window_keeps_its_bounds_and_is_cut_once_in_a_round_trip(
    events: list[str], floor: int, ceiling: int, quota: int
):
    window = make(floor, ceiling, quota)
    flight: deque[int] = deque()
    newest, ended = -1, []
    cuts: list[tuple[int, int]] = []  # completions begun before a cut, and ended before it
    loads = {"queue": QUEUE, "full": FULL, "calm": CALM, "unknown": None}
    for event in events:
        size, in_flight, num_cuts = window.size, len(flight), window.num_cuts
        if event == "fill":  # by whole groups, as dispatch does
            while len(flight) < window.size:
                flight.extend(newest := window.begin() for _ in range(window.floor))
            assert len(flight) <= max(in_flight, size + window.floor - 1)
            continue
        if event in loads:
            window.report(loads[event], in_flight)
        elif flight:
            number = flight.popleft()
            window.fail(number) if event == "fail" else window.succeed(number, in_flight)
            ended.append(number)
        if window.num_cuts > num_cuts:
            cuts.append((newest + 1, len(ended)))
        assert window.floor <= window.size <= ceiling
        assert window.size <= size + 1
        assert window.size >= size or event in ("fail", "queue", "full")
    for (begun, before), (_, later) in itertools.pairwise(cuts):
        # Something that was begun after the one cut has ended before, or with, the next.
        assert any(number >= begun for number in ended[before:later])


def test_a_window_that_is_not_used_does_not_grow():
    window = make(floor=2, quota=16)
    for _ in range(1000):
        window.succeed(window.begin(), in_flight=14)
    assert window.size == 16
    for _ in range(16):
        window.succeed(window.begin(), in_flight=15)  # no other group would have fitted
    assert window.size == 17


def test_two_reports_of_pressure_in_a_row_halve_what_was_in_flight():
    for load in (QUEUE, FULL):
        window = make(quota=64)
        for report in (load, CALM, load, None, load):
            window.report(report, in_flight=20)
        assert window.size == 64
        window.report(load, in_flight=20)
        assert window.size == 10
    window = make(floor=4)
    for _ in range(5):  # a queue shorter than a group
        window.report(ServerLoad(running=16, waiting=3, kv_use=None), in_flight=16)
    assert window.size == 16


def test_a_burst_of_failures_is_one_cut_and_late_news_of_it_none():
    window = make(quota=32)
    before = [window.begin() for _ in range(32)]
    for number in before[:20]:
        window.fail(number)
    assert (window.size, window.num_cuts) == (16, 1)
    after = window.begin()
    window.succeed(after, in_flight=13)
    for number in before[20:]:
        window.fail(number)  # begun before the cut
    assert (window.size, window.num_cuts) == (16, 1)
    window.fail(window.begin())
    assert (window.size, window.num_cuts) == (8, 2)


def test_a_quota_grows_when_a_server_leaves_until_there_was_pressure():
    window = make(ceiling=64, quota=16)
    window.offer(32)
    assert window.size == 32
    window.offer(16)
    assert window.size == 32
    window.fail(window.begin())
    window.offer(64)
    assert window.size == 16


@pytest.mark.parametrize("quota", [4, 256])
def test_the_window_settles_around_what_the_server_can_do(quota: int):
    """The server writes 40 completions at a time, each for some turns; the others wait."""
    rng, left = random.Random(7), {}
    window = make(floor=4, ceiling=256, quota=quota)
    sizes, busy = [], []
    for turn in range(6_000):
        while len(left) < window.size:
            for _ in range(window.floor):
                left[window.begin()] = rng.randint(5, 40)
        for number in list(left)[:40]:
            left[number] -= 1
            if left[number] == 0:
                window.succeed(number, len(left))
                del left[number]
        running = min(len(left), 40)
        if turn % 10 == 0:
            window.report(ServerLoad(running, len(left) - running, None), len(left))
        if turn > 3_000:
            sizes.append(window.size)
            busy.append(running)
    # Half of what queues is the least, and a queue of some groups the most.
    assert 16 <= min(sizes) <= max(sizes) <= 64
    assert window.num_cuts > 3
    assert sum(busy) / len(busy) > 0.75 * 40
