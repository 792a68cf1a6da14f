# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A lane's states, and the pause after failures."""

import pytest

from torchtitan.grpo.weight_sync.lane import LaneEvent, LaneState, next_state


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
