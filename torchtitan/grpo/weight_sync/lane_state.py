# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The states of one server's lane, and what leads from one to the next.

             +------------------- newer_version --------------------+
             v                                                      |
    JOINING ---joined---> SYNCING ---committed---> ATTESTING ---attested---> READY
       ^                     |                         |                       |
       |                     | failed                  | failed,               | failed,
   retry_due                 |                         | version_mismatch      | version_mismatch
       |                     v                         v                       |
       +------------------ LOST <-----------------------------------------------+

JOINING fails into LOST, too, and every state but CLOSED goes to CLOSED when the server is
removed. A lane joins when it has a version to send: the first push after a join is a whole
one, whatever the server says it holds, since it may be another process than before.

What the dispatcher may believe follows from the state:

- It is told a version at ``attested``, never before: the server has answered the commit,
  and after that named the version itself.
- It keeps believing the former version while a READY lane's next push is under way, because
  the server writes under the former one until it commits, and names the version of every
  token.
- It is told of the loss at ``failed`` and ``version_mismatch``, before the lane clears up
  behind itself (leaves the groups, lifts the pause). The retry is due after that.

The lane of a READY server goes on asking for its version: one that was restarted answers,
with other weights, and nothing else would show it where no newer version comes.
"""

from enum import Enum


class LaneState(Enum):
    JOINING = "joining"
    """Making process groups with the server."""
    SYNCING = "syncing"
    """Sending a version, up to the commit's answer."""
    ATTESTING = "attesting"
    """Comparing what the server says it serves with what was sent."""
    READY = "ready"
    """The server serves an attested version; nothing is under way."""
    LOST = "lost"
    """Clearing up after a failure, then waiting until it is time to join anew."""
    CLOSED = "closed"
    """The server was removed from the run."""


class LaneEvent(Enum):
    JOINED = "joined"
    NEWER_VERSION = "newer_version"
    COMMITTED = "committed"
    ATTESTED = "attested"
    FAILED = "failed"
    """The reason is kept by the lane; what comes next does not depend on it."""
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
    """Where ``event`` leads from ``state``.

    Raises:
        ValueError: Nowhere: it must not happen there.
    """
    following = _NEXT.get((state, event))
    if following is None:
        possible = sorted(e.value for s, e in _NEXT if s is state)
        raise ValueError(
            f"A lane that is {state.value} can take {possible or 'no event'}, got {event.value!r}."
        )
    return following


class Backoff:
    """How long to wait after each of several failures in a row: twice as long each time.

    Args:
        first_seconds: After the first failure.
        longest_seconds: It grows no further than this.
    """

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        if not 0 < first_seconds <= longest_seconds:
            raise ValueError(
                "weight_sync.retry_seconds must be above 0 and at most "
                f"weight_sync.max_retry_seconds, got {first_seconds} and {longest_seconds}."
            )
        self._first_seconds, self._longest_seconds = first_seconds, longest_seconds
        self.num_failures = 0

    def seconds_after_failure(self) -> float:
        """Counts a failure; returns the pause after it."""
        # A float reaches no further than 2 to the 1023.
        doublings = min(self.num_failures, 64)
        self.num_failures += 1
        return min(self._first_seconds * 2.0**doublings, self._longest_seconds)

    def reset(self) -> None:
        """After a success."""
        self.num_failures = 0
