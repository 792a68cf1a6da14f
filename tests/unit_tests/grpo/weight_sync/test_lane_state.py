# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A lane's states, and the pause after failures."""

import pytest

from torchtitan.grpo.weight_sync.lane import LaneEvent, LaneState, next_state


def _after(*events, state=LaneState.JOINING):
    for event in events:
        state = next_state(state, event)
    return state


def test_a_server_becomes_ready_by_joining_a_whole_push_and_attestation():
    way = (LaneEvent.JOINED, LaneEvent.COMMITTED, LaneEvent.ATTESTED)
    assert _after(*way) is LaneState.READY
    assert _after(*way, LaneEvent.NEWER_VERSION, *way[1:]) is LaneState.READY


@pytest.mark.parametrize(
    "state", [LaneState.JOINING, LaneState.SYNCING, LaneState.ATTESTING, LaneState.READY]
)
def test_a_server_that_fails_in_any_state_is_lost_and_joins_again(state):
    way = (LaneEvent.FAILED, LaneEvent.RETRY_DUE)
    assert _after(*way, state=state) is LaneState.JOINING


@pytest.mark.parametrize("state", [LaneState.ATTESTING, LaneState.READY])
def test_a_server_that_serves_something_else_is_lost(state):
    assert next_state(state, LaneEvent.VERSION_MISMATCH) is LaneState.LOST


def test_nothing_leads_to_ready_but_attestation():
    ways = [(s, e) for s in LaneState for e in LaneEvent if _leads_to(s, e) is LaneState.READY]
    assert ways == [(LaneState.ATTESTING, LaneEvent.ATTESTED)]


def test_a_removed_server_is_closed_for_good():
    for state in set(LaneState) - {LaneState.CLOSED}:
        assert next_state(state, LaneEvent.REMOVED) is LaneState.CLOSED
    assert [_leads_to(LaneState.CLOSED, event) for event in LaneEvent] == [None] * len(LaneEvent)


def test_what_must_not_happen_is_refused_with_what_may():
    with pytest.raises(ValueError, match=r"syncing can take \['committed', 'failed', 'removed'\]"):
        next_state(LaneState.SYNCING, LaneEvent.ATTESTED)


def _leads_to(state, event):
    try:
        return next_state(state, event)
    except ValueError:
        return None
