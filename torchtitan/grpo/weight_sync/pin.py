# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps a server at the weights of an evaluation as long as training does not need the server.

    free --- set ---> pinned --- set(None), or the server is gone ---> free
                        |
                        +------- yield_if_needed --------------------> free

A pinned server takes no new weights, so its rollouts become too old for training. Another server
has to take the new weights meanwhile. If no other server takes them, training needs the pinned
server. The pin then ends, so that training never waits for an evaluation.
"""

import threading
import time
from collections.abc import Sequence

from torchtitan.grpo.weight_sync.lane import Lane

# Other servers may lag behind for this time or, if it is longer, for this many times the duration of
# their last push.
_PATIENCE_SECONDS = 10.0
_PATIENCE_PUSHES = 4


class Pin:
    """Holds at most one lane at a version; see the module's docstring. Any thread may use it."""

    def __init__(self) -> None:
        self._lane: Lane | None = None
        self._lock = threading.Lock()
        self._progress = (-1, 0.0)  # newest version of the other servers, and time of its arrival

    @property
    def url(self) -> str | None:
        """URL of the pinned server; ``None`` if no server is pinned."""
        lane = self._lane
        return lane.url if lane is not None else None

    def set(self, lanes: Sequence[Lane], version: int | None) -> list[str]:
        """Pins the server with the newest version, and unpins the server that was pinned before.

        Args:
            lanes: The lanes of all servers.
            version: The server keeps the first version that is not older than this one. ``None``
                pins no server.

        Returns:
            A list with the URL of the pinned server, which is empty if no server is pinned.
        """
        with self._lock:
            self._release()
            # A server that is still starting does not count, because the pinned server would then
            # have to generate all rollouts.
            able = [lane for lane in lanes if _is_able(lane)]
            if version is None or len(able) < 2:
                return []
            chosen = max(able, key=lambda lane: lane.version)  # it reaches the version first
            chosen.held_from, self._lane = version, chosen
            self._progress = (-1, time.monotonic())
            return [chosen.url]

    def yield_if_needed(self, lanes: Sequence[Lane], published: int) -> None:
        """Ends the pin if no other server takes new weights.

        Args:
            lanes: The lanes of all servers.
            published: Newest published version.
        """
        with self._lock:
            pinned = self._lane
            if pinned is None:
                return
            others = [lane for lane in lanes if lane is not pinned and _is_able(lane)]
            if pinned not in lanes or not others or self._is_patience_over(others, published):
                self._release()

    def _is_patience_over(self, others: Sequence[Lane], published: int) -> bool:
        newest, now = max(lane.version for lane in others), time.monotonic()
        if newest >= published or newest != self._progress[0]:
            self._progress = (newest, now)
            return False
        pushes = [lane.last_push.push_seconds for lane in others if lane.last_push is not None]
        patience = max([_PATIENCE_SECONDS, *(_PATIENCE_PUSHES * seconds for seconds in pushes)])
        return now - self._progress[1] > patience

    def _release(self) -> None:
        if self._lane is not None:
            self._lane.held_from, self._lane = None, None


def _is_able(lane: Lane) -> bool:
    """Returns whether a server serves a version, and newer versions can be prepared for it."""
    return lane.version >= 0 and not lane.is_blocked
