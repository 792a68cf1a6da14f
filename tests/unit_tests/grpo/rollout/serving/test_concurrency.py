# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The window of a server, from traces of what a server might do."""

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


class Driver:
    """Keeps a window full, by whole groups, as dispatch does; remembers what became of it."""

    def __init__(self, window: ConcurrencyWindow) -> None:
        self.window = window
        self.flight: deque[int] = deque()
        self.newest = -1
        self.ended: list[int] = []
        # Of each cut: completions begun before it, and completions ended before it.
        self.cuts: list[tuple[int, int]] = []

    def fill(self) -> None:
        while len(self.flight) < self.window.size:
            for _ in range(self.window.floor):
                self.newest = self.window.begin()
                self.flight.append(self.newest)

    def do(self, event: str) -> None:
        before = self.window.num_cuts
        if event in ("succeed", "fail"):
            if not self.flight:
                return
            number = self.flight[0]
            if event == "succeed":
                self.window.succeed(number, len(self.flight))
            else:
                self.window.fail(number)
            self.flight.popleft()
            self.ended.append(number)
        else:
            loads = {"queue": QUEUE, "full": FULL, "calm": CALM, "unknown": None}
            self.window.report(loads[event], len(self.flight))
        if self.window.num_cuts > before:
            self.cuts.append((self.newest + 1, len(self.ended)))


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
    driver = Driver(window)
    for event in events:
        size, in_flight = window.size, len(driver.flight)
        if event == "fill":
            driver.fill()
            assert len(driver.flight) <= max(in_flight, size + window.floor - 1)
            continue
        driver.do(event)
        assert window.floor <= window.size <= ceiling
        assert window.size <= size + 1
        assert window.size >= size or event in ("fail", "queue", "full")
    for (begun, ended), (_, later) in zip(driver.cuts, driver.cuts[1:], strict=False):
        # Something that was begun after the one cut has ended before, or with, the next.
        assert any(number >= begun for number in driver.ended[ended:later])


def test_a_full_window_grows_by_one_with_each_window_of_completions():
    window = make(floor=1, quota=4)
    driver = Driver(window)
    sizes = []
    for _ in range(4 + 5 + 6):
        driver.fill()
        driver.do("succeed")
        sizes.append(window.size)
    assert sizes == [4] * 3 + [5] * 5 + [6] * 6 + [7]


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
