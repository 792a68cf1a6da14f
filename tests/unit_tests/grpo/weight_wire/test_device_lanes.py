# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests that aborts and broadcasts keep out of each other's way."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest

from torchtitan.grpo.weight_wire import device_lanes
from torchtitan.grpo.weight_wire.device_lanes import aborting, broadcasting

SECONDS = 20


def held(
    pool: ThreadPoolExecutor, gate: Callable[[], AbstractContextManager[None]]
) -> tuple[threading.Event, threading.Event, "Future[None]"]:
    """Holds a gate on a thread; returns what says that it is held, what ends it, and its end."""
    is_held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with gate():
            is_held.set()
            assert end.wait(SECONDS)

    return is_held, end, pool.submit(hold)


@pytest.mark.parametrize(("first", "second"), [(broadcasting, aborting), (aborting, broadcasting)])
def test_an_abort_and_a_broadcast_wait_for_each_other(monkeypatch, first, second):
    monkeypatch.setattr(device_lanes, "_WAIT_SECONDS", SECONDS)
    with ThreadPoolExecutor(2) as pool:
        is_first, end_first, first_end = held(pool, first)
        assert is_first.wait(SECONDS)
        is_second, end_second, second_end = held(pool, second)
        assert not is_second.wait(0.1)
        end_first.set()
        assert is_second.wait(SECONDS)
        end_second.set()
        for end in (first_end, second_end):
            end.result(SECONDS)


@pytest.mark.parametrize("gate", [broadcasting, aborting])
def test_those_of_one_kind_go_together(gate):
    with gate(), ThreadPoolExecutor(1) as pool:
        is_held, end, done = held(pool, gate)
        assert is_held.wait(SECONDS)
        end.set()
        done.result(SECONDS)


def test_nobody_waits_without_end(monkeypatch):
    monkeypatch.setattr(device_lanes, "_WAIT_SECONDS", 0.05)
    with aborting(), broadcasting(), aborting():
        pass
    assert (device_lanes._aborts, device_lanes._num_broadcasts) == ({}, 0)


def test_an_abort_that_hangs_delays_broadcasts_once_and_not_each_of_them(monkeypatch):
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits))
    monkeypatch.setattr(device_lanes, "time", clock)
    monkeypatch.setattr(device_lanes._changed, "wait", waits.append)
    with aborting():
        for _ in range(8):
            with broadcasting():
                pass
    assert waits == [device_lanes._WAIT_SECONDS]
