# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One server's pushes.

    JOINING --joined--> READY --newer version--> SYNCING --confirmed--> READY
       ^                  |                         |
       |                  | serves something else   | failed
       +---- a while ---- LOST <--------------------+

The newest version wins: a lane that is done takes what is newest then, not what came next.
A lane waits for its own server alone, each time with a bound, so a slow, stopped or dead
server delays nobody else. A lost server gets no work until it has been joined anew and has
confirmed the newest weights.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.weight_sync.connection import PushReport, ServerConnection
from torchtitan.grpo.weight_sync.payloads import Gathered, Payloads

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
# How often an idle lane asks whether the server still serves what was pushed: one that was
# restarted answers, with other weights.
_CHECK_SECONDS = 5.0
_LOSSES = (ServerError, OSError, TimeoutError, RuntimeError)
"""What a push may fail with on account of the server; RuntimeError covers torch's own."""


class LaneState(Enum):
    JOINING = "joining"
    READY = "ready"
    SYNCING = "syncing"
    LOST = "lost"


class Lane:
    """See the module's docstring.

    Args:
        connection: The server.
        payloads: Where versions come from.
        on_change: Told after each change of what is public here.
        on_version: Told (url, version) when the server has confirmed a version.
        on_lost: Told (url, reason) when it is lost.

    Attributes:
        state: Where the lane is.
        version: What the server has confirmed; -1 before that, and while it is lost.
        num_pushes: Confirmed pushes.
        num_failures: How often the server was lost.
        last_error: Of the last loss.
        last_push: Of the last confirmed push.
    """

    def __init__(
        self,
        connection: ServerConnection,
        payloads: Payloads,
        *,
        on_change: Callable[[], None],
        on_version: Callable[[str, int], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self.url = connection.client.url
        self.state = LaneState.JOINING
        self.version = -1
        self.num_pushes = self.num_failures = 0
        self.last_error = ""
        self.last_push: PushReport | None = None
        self._connection, self._payloads = connection, payloads
        self._on_change, self._on_version, self._on_lost = on_change, on_version, on_lost

    @property
    def is_lost(self) -> bool:
        """From a loss until the newest weights are confirmed, attempts to rejoin included."""
        return self.num_failures > 0 and self.version < 0

    async def run(self) -> None:
        """Serves the lane until it is cancelled."""
        while True:
            gathered = await self._payloads.newer_than(self.version, _CHECK_SECONDS)
            try:
                if gathered is None:
                    await self._check()
                else:
                    await self._push(gathered)
            except _LOSSES as error:
                self._lose(str(error) or type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                if gathered is not None:
                    self._confirm(gathered.version)

    async def close(self) -> None:
        """Leaves the server's group and closes the client."""
        await self._connection.close()
        await self._connection.client.close()

    async def _check(self) -> None:
        if self.state is not LaneState.READY:
            return
        served = await self._connection.client.version()
        if served != self.version:
            raise ServerError(
                f"{self.url} must serve version {self.version}, it says {served}: it was "
                "restarted, or somebody else updates it."
            )

    async def _push(self, gathered: Gathered) -> None:
        with self._payloads.reading(gathered):
            if self.state in (LaneState.JOINING, LaneState.LOST):
                self._change(LaneState.JOINING)
                await self._connection.join()
            self._change(LaneState.SYNCING)
            self.last_push = await self._connection.push(gathered.version, gathered.buckets)

    def _confirm(self, version: int) -> None:
        self.num_pushes += 1
        self.version = version
        self._on_version(self.url, version)
        self._change(LaneState.READY)

    def _lose(self, reason: str) -> None:
        self.num_failures += 1
        self.last_error = reason
        self.version = -1
        logger.warning("Lost %s while %s: %s", self.url, self.state.value, reason)
        self._on_lost(self.url, reason)
        self._change(LaneState.LOST)

    def _change(self, state: LaneState) -> None:
        self.state = state
        self._on_change()
