# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the training thread waits for where it is asked to wait for servers."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.weight_sync.lane import LaneState
from torchtitan.grpo.weight_sync.publisher import WeightPublisher, lane_metrics
from torchtitan.grpo.weight_sync.slots import SlotTable, SlotVersions


class Waiting(WeightPublisher):
    """One with these lanes, and no threads."""

    snapshots: Any

    def __init__(self, *lanes: Any) -> None:
        self.error, self._leader = None, None
        self._changed = threading.Condition()
        self._lanes = list(lanes)

    @property
    def lanes(self) -> Any:
        return self._lanes


def lane(**changes: Any) -> Any:
    values = {"url": "http://a", "state": LaneState.READY, "version": 3, "last_error": ""}
    return SimpleNamespace(
        **values | {"is_lost": False, "is_asleep": False, "is_blocked": False} | changes
    )


def test_a_version_that_cannot_be_written_is_not_waited_for_without_end():
    publisher = Waiting(lane(is_blocked=True, last_error="no space left on the device"))
    with pytest.raises(
        TimeoutError, match=r"http://a is ready and serves version 3 \(no space left"
    ):
        publisher.wait_for(4, 0.3, lambda: False)


def test_a_server_that_is_there_is_waited_for_as_long_as_its_lane_lets_it():
    publisher = Waiting(lane(), lane(url="http://b", is_lost=True, version=-1))
    looks = iter(range(5))
    publisher.wait_for(4, 0.1, lambda: next(looks, None) is None)
    assert next(looks, None) is None


def test_a_server_that_sleeps_is_not_waited_for_and_serves_no_version():
    counts = dict.fromkeys(("num_pushes", "num_attested", "num_failures"), 0)
    asleep = lane(url="http://b", is_asleep=True, version=-1, last_push=None, **counts)
    publisher = Waiting(lane(last_push=None, **counts), asleep)
    publisher.slots = SlotTable(2)
    publisher.snapshots = SimpleNamespace(stalled_seconds=0.0)
    publisher.wait_for(3, 60.0, lambda: pytest.fail("the version is served"))
    metrics = publisher.metrics()
    assert metrics["weight_sync/server_version"] == 3
    assert metrics["weight_sync/lost_servers"] == 0
    assert lane_metrics(asleep, published=7)["lag"] == 0


def test_a_server_that_goes_on_sleeping_is_not_waited_for_without_end():
    publisher = Waiting(lane(is_asleep=True, version=-1))
    with pytest.raises(TimeoutError, match="no server could take it"):
        publisher.wait_for(4, 0.3, lambda: False)


@pytest.mark.parametrize("behind", [0, 1])
def test_each_server_that_is_there_is_waited_for(behind: int):
    lanes = [lane(version=4), lane(url="http://b", version=4)]
    lanes[behind].version = 3
    looks = iter(range(2))

    def look() -> bool:
        if next(looks, None) is None:
            lanes[behind].version = 4
        return False

    Waiting(*lanes).wait_for(4, 60.0, look)
    assert lanes[behind].version == 4


def test_the_training_thread_fences_and_tells_of_a_slot_only_as_its_copy_is_started():
    slots, calls = SlotTable(2), list[str]()

    def copy_into(slot: int, announce: Callable[[], None], wake: Callable[[], None]) -> None:
        assert slots.take_newest(0) is None, "a reader would find the slot before its copy"
        announce()
        calls.append(f"copy into {slot}")

    publisher = Waiting()
    publisher.slots = slots
    publisher.snapshots = SimpleNamespace(fence=lambda: calls.append("fence"), copy_into=copy_into)
    slot = publisher.reserve_slot()
    publisher.fence()
    publisher.publish(7, slot)
    assert calls == ["fence", f"copy into {slot}"]
    assert slots.take_newest(0) == (slot, 7)
    assert slots.published == 7


def test_a_reader_waits_until_its_slot_holds_the_version_and_no_other():
    slots = SlotVersions()
    slots.filled(0, 3)
    slots.filled(1, 4)
    with pytest.raises(TimeoutError, match=r"publish version 4 .* slot 0 still holds version 3"):
        slots.wait_filled(0, 4, 0.01)
    reader = threading.Thread(target=slots.wait_filled, args=(0, 5, 30.0))
    reader.start()
    slots.filled(0, 5)
    slots.wake()
    reader.join(20.0)
    assert not reader.is_alive()
