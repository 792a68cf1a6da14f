"""The newest filled slot is sent, and a slot that is being sent is never reserved."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.weight_sync.slots import SlotTable, SlotVersions


def test_a_waiting_snapshot_gives_way_to_a_newer_one():
    slots = SlotTable(2)
    first = slots.reserve()
    slots.filled(first, 1)
    assert slots.take_newest(0) == (first, 1)
    second = slots.reserve()
    slots.filled(second, 2)
    assert slots.reserve() == second != first
    assert slots.num_superseded == 1
    slots.filled(second, 3)
    slots.release(first)
    assert slots.take_newest(0) == (second, 3)


def test_nothing_filled_is_none_after_the_timeout():
    assert SlotTable(2).take_newest(0) is None


def test_a_single_slot_is_refused():
    with pytest.raises(ValueError, match=r"weight_sync\.num_slots"):
        SlotTable(1)


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


ACTIONS = ["publish", "take", "release", "hold", "drop"]


@given(st.integers(2, 4), st.integers(0, 3), st.lists(st.sampled_from(ACTIONS), max_size=60))
def test_the_newest_version_always_finds_a_slot_and_is_taken_next(num_slots, max_held, actions):
    slots, sending, newest, taken = SlotTable(num_slots, max_held), None, 0, 0
    held: list[int] = []
    for action in actions:
        if action == "publish":
            slot = slots.reserve()
            assert slot not in (sending, *held)
            newest += 1
            slots.filled(slot, newest)
        elif action == "take" and sending is None:
            got = slots.take_newest(0)
            assert (got is None) == (newest == taken)
            if got is not None:
                sending, taken = got
                assert taken == newest
        elif action == "release" and sending is not None:
            slots.release(sending)
            sending = None
        elif action == "hold" and sending is not None:
            assert slots.can_hold() == (len(held) < max_held)
            if slots.can_hold():
                slots.hold(sending)
                held, sending = [*held, sending], None
        elif action == "drop" and held:
            slots.release(held.pop(0))


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
