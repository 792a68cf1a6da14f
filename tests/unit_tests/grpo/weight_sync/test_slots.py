"""The newest filled slot is sent, and a slot that is being sent is never reserved."""

import threading

import pytest

from torchtitan.grpo.weight_sync.slots import SlotTable, SlotVersions


def test_what_servers_are_sent_is_held_and_leaves_the_others_their_slots():
    slots = SlotTable(2, max_held=1)
    slots.filled(slots.reserve(), 1)
    first, _ = slots.take_newest(0) or (None, None)
    assert first is not None and slots.can_hold()
    slots.hold(first)
    slots.filled(slots.reserve(), 2)
    second, version = slots.take_newest(0) or (None, None)
    assert second is not None and (second != first, version) == (True, 2)
    assert not slots.can_hold(), "one that is written next must remain"
    third = slots.reserve()
    assert third not in (first, second)
    slots.release(second)
    slots.release(first)
    assert slots.can_hold()


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
    assert slots.published == 5
