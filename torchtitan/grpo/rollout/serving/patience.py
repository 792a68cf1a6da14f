# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Bounds how long a completion waits for a server, while servers may sleep."""

import time
from collections.abc import Callable, Iterable

from torchtitan.grpo.rollout.serving.server_state import Server


class Patience:
    """Ends after some seconds, not counting those in which no server can come but one that sleeps.

    Servers sleep while the trainer trains, for as long as that takes.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock, self._looked_at = seconds, clock, clock()

    def has_ended(self, servers: Iterable[Server]) -> bool:
        """Must be asked often: what ``servers`` do now is assumed to hold since the last call."""
        now = self._clock()
        awaited = [s for s in servers if s.waits_for_devices or not s.is_down]
        if not awaited or any(not server.waits_for_devices for server in awaited):
            self._left -= now - self._looked_at
        self._looked_at = now
        return self._left < 0
