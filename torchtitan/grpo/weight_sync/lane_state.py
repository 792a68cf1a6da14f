# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The states of one server's lane, and the events that lead from one to the next.

             +------------------- newer_version --------------------+
             v                                                      |
    JOINING ---joined---> SYNCING ---committed---> ATTESTING ---attested---> READY
       ^                     |                         |                       |
       |                     | failed                  | failed,               | failed,
   retry_due                 |                         | version_mismatch      | version_mismatch
       |                     v                         v                       |
       +------------------ LOST <-----------------------------------------------+

A failure in JOINING leads to LOST as well, and every state but CLOSED leads to CLOSED when
the server is removed. A lane joins when it has a version to send. The first push after a
join sends everything, whatever version the server reports, because the server may be a new
process.

The state determines what the dispatcher may assume:

- The dispatcher learns of a version at ``attested`` and never before. By then, the server has
  answered the commit and has afterwards reported the version itself.
- While the next push of a READY lane is under way, the dispatcher continues to assume the
  former version. The server generates with the former version until it commits, and it reports
  the version of every token.
- The dispatcher learns of a loss at ``failed`` and ``version_mismatch``, before the lane
  recovers (leaves the groups and ends the pause). The retry is due after the recovery.

The lane of a READY server asks repeatedly for the server's version. A server that was restarted
answers but serves other weights, and no other check would reveal this until a newer version is
pushed.
"""

from enum import Enum


class LaneState(Enum):
    JOINING = "joining"
    """The connection to the server is being made."""
    SYNCING = "syncing"
    """A version is being sent, up to the answer to the commit."""
    ATTESTING = "attesting"
    """The weights that the server serves are being compared with those that were sent."""
    READY = "ready"
    """The server serves an attested version, and no push is under way."""
    LOST = "lost"
    """The lane recovers from a failure, then waits until it is time to join again."""
    CLOSED = "closed"
    """The server was removed from the run."""


class LaneEvent(Enum):
    JOINED = "joined"
    NEWER_VERSION = "newer_version"
    COMMITTED = "committed"
    ATTESTED = "attested"
    FAILED = "failed"
    """A request or a transfer failed. The lane records the reason; the next state is LOST."""
    VERSION_MISMATCH = "version_mismatch"
    RETRY_DUE = "retry_due"
    REMOVED = "removed"


_NEXT = {
    (LaneState.JOINING, LaneEvent.JOINED): LaneState.SYNCING,
    (LaneState.JOINING, LaneEvent.FAILED): LaneState.LOST,
    (LaneState.SYNCING, LaneEvent.COMMITTED): LaneState.ATTESTING,
    (LaneState.SYNCING, LaneEvent.FAILED): LaneState.LOST,
    (LaneState.ATTESTING, LaneEvent.ATTESTED): LaneState.READY,
    (LaneState.ATTESTING, LaneEvent.FAILED): LaneState.LOST,
    (LaneState.ATTESTING, LaneEvent.VERSION_MISMATCH): LaneState.LOST,
    (LaneState.READY, LaneEvent.NEWER_VERSION): LaneState.SYNCING,
    (LaneState.READY, LaneEvent.FAILED): LaneState.LOST,
    (LaneState.READY, LaneEvent.VERSION_MISMATCH): LaneState.LOST,
    (LaneState.LOST, LaneEvent.RETRY_DUE): LaneState.JOINING,
} | {
    (state, LaneEvent.REMOVED): LaneState.CLOSED
    for state in LaneState
    if state is not LaneState.CLOSED
}


def next_state(state: LaneState, event: LaneEvent) -> LaneState:
    """Returns the state to which ``event`` leads from ``state``.

    Raises:
        ValueError: If the event must not happen in this state.
    """
    following = _NEXT.get((state, event))
    if following is None:
        possible = sorted(e.value for s, e in _NEXT if s is state)
        raise ValueError(
            f"A lane that is {state.value} can take {possible or 'no event'}, but got {event.value!r}."
        )
    return following
