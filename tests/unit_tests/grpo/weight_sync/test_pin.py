# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which server is left at the weights of an evaluation, and when training gets it back."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.weight_sync import leader as module
from torchtitan.grpo.weight_sync.leader import Pin


def lane(name: str, version: int, **changes: Any) -> Any:
    values = {"url": f"http://{name}", "version": version, "held_from": None, "last_push": None}
    return SimpleNamespace(**values | {"is_blocked": False} | changes)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_of_several_servers_that_are_there_the_newest_is_pinned_and_a_single_one_never():
    lost = lane("c", -1)
    lanes = [lane("a", 3), lane("b", 4), lost]
    pin = Pin()
    pin.set(lanes, 5)
    assert [each.held_from for each in lanes] == [None, 5, None]
    assert pin.url == "http://b"
    pin.set(lanes, None)
    assert [each.held_from for each in lanes] == [None, None, None]
    assert pin.url is None
    pin.set([lanes[0], lost], 5)
    assert pin.url is None


def test_beside_a_server_that_is_only_starting_none_is_pinned():
    serving = lane("a", 3)
    Pin().set([serving, lane("b", -1)], 5)
    assert serving.held_from is None


def test_a_pinned_server_yields_when_no_other_is_left():
    pinned, other = lanes = [lane("a", 3), lane("b", 2)]
    pin = Pin()
    pin.set(lanes, 3)
    pin.yield_if_needed(lanes, 3)
    assert pinned.held_from == 3
    other.version = -1
    pin.yield_if_needed(lanes, 4)
    assert (pinned.held_from, pin.url) == (None, None)


def test_a_pinned_server_yields_when_the_others_cannot_be_sent_anything():
    lanes = [lane("a", 3), lane("b", 2)]
    pin = Pin()
    pin.set(lanes, 3)
    lanes[1].is_blocked = True
    pin.yield_if_needed(lanes, 4)
    assert pin.url is None


def test_a_pinned_server_yields_when_the_others_take_nothing_for_long(clock: list[float]):
    lanes = [lane("a", 3), lane("b", 3)]
    pin = Pin()
    pin.set(lanes, 3)
    for second, version, published in ((0, 3, 3), (9, 3, 4), (18, 4, 5), (27, 4, 5)):
        clock[0], lanes[1].version = second, version
        pin.yield_if_needed(lanes, published)
        assert pin.url == "http://a"
    clock[0] = 29
    pin.yield_if_needed(lanes, 5)
    assert pin.url is None


def test_servers_whose_pushes_take_long_have_longer(clock: list[float]):
    lanes = [lane("a", 3), lane("b", 3, last_push=SimpleNamespace(push_seconds=60.0))]
    pin = Pin()
    pin.set(lanes, 3)
    for second in (0, 239):
        clock[0] = second
        pin.yield_if_needed(lanes, 4)
        assert pin.url == "http://a"
    clock[0] = 241
    pin.yield_if_needed(lanes, 4)
    assert pin.url is None


def test_a_pin_ends_with_its_server():
    pinned, *others = [lane("a", 3), lane("b", 2), lane("c", 2)]
    pin = Pin()
    pin.set([pinned, *others], 3)
    pin.yield_if_needed(others, 4)
    assert (pinned.held_from, pin.url) == (None, None)
