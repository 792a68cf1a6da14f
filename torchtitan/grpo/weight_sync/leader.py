# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Leads the push on rank 0: makes all ranks gather versions, and runs a lane for each server.

    consumes        filled slots
    produces        versions that the source ranks hold, for the lanes
    waits for       a filled slot; all ranks' copies and shards; room for another version
    unblocked by    the training threads; `weight_sync.timeout_seconds`

The leader runs in one event loop, on the publisher's thread.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.attestation import Attestation
from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.agent import Agent
from torchtitan.grpo.weight_sync.lane import Lane, Listeners
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.transports.interface import Transport
from torchtitan.grpo.weight_sync.versions import Versions

logger = logging.getLogger(__name__)

# Interval at which an idle leader checks whether it should end and whether servers have changed.
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LeaderParts:
    """Holds the objects that a leader uses. It is made within the publisher's event loop.

    Attributes:
        agents: Agents of all ranks, in the order of ranks.
        sources: Agents of the source ranks.
        transport: Sends versions to servers. Its ``lead`` method has been called.
        make_client: Makes the client of one server.
        listen: Starts a task that receives the other ranks' answers until it is cancelled.
        close: Closes the objects above.
    """

    agents: Sequence[Agent]
    sources: Sequence[Agent]
    transport: Transport[Any]
    make_client: Callable[[ServerInfo], InferenceClient]
    listen: Callable[[], "asyncio.Task[None]"]
    close: Callable[[], Awaitable[None]]


class Leader:
    """Makes ranks gather versions and runs a lane for each server; see the module's docstring.

    Args:
        slots: The slots, which the training thread fills.
        parts: The objects that the leader uses.
        sync: The table ``[weight_sync]``.
        attestation: Settings of the check that a server serves what was pushed.
        listeners: Callbacks of all lanes.
        servers: The servers at the start.
        changed_servers: Called repeatedly. Returns all servers if they have changed since the last
            call, and otherwise ``None``.

    Attributes:
        lanes: The lanes, one for each server that belongs to the run.
        gather_seconds: Duration of gathering the last version.
        error: The error that ended :meth:`run`. It is set before the method has finished closing.
    """

    def __init__(
        self,
        slots: SlotTable,
        parts: LeaderParts,
        sync: WeightSync,
        attestation: Attestation,
        listeners: Listeners,
        servers: Sequence[ServerInfo],
        changed_servers: Callable[[], list[ServerInfo] | None],
    ) -> None:
        self.lanes: list[Lane] = []
        self.gather_seconds = 0.0
        self.error: BaseException | None = None
        self._parts = parts
        self._sync, self._attestation, self._listeners = sync, attestation, listeners
        self._servers, self._changed_servers = servers, changed_servers
        self._versions = Versions(slots, max_alive(sync, len(servers)), self._drop)
        self._was_started = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}

    @property
    def num_versions(self) -> int:
        """Number of versions that have buffers now."""
        return self._versions.num_alive

    async def run(self, should_end: Callable[[], bool]) -> None:
        """Leads the push until ``should_end`` returns True.

        The method raises any error that ends a lane or the gathering.
        """
        listening = self._parts.listen()
        self._set_servers(self._servers)
        try:
            while not should_end():
                self._raise_what_ended(listening)
                servers = self._changed_servers()
                if servers is not None:
                    self._set_servers(servers)
                await self._gather_next()
        except BaseException as error:
            self.error = error
            raise
        finally:
            await self._end(listening)

    async def _gather_next(self) -> None:
        """Gathers the newest version, if a slot is filled and there is room for the version."""
        taken = await self._versions.take_newest(_POLL_SECONDS)
        if taken is None:
            return
        slot, version = taken.slot, taken.version
        begin = time.perf_counter()
        agents = self._parts.agents
        # The push of the version starts only after all ranks have copied it. Otherwise, a server
        # would wait in the middle of a push for a rank that is behind or, on a shared host, take
        # cores from that rank at its step boundary.
        await _all([asyncio.create_task(agent.wait_copied(slot, version)) for agent in agents])
        gathering = [
            asyncio.create_task(
                agent.gather(slot, version, taken.is_held), name=f"gather-{agent.rank}"
            )
            for agent in agents
        ]
        # This lets the source ranks take buffers before any lane asks for the version.
        await asyncio.sleep(0)
        await self._versions.begin(version)
        await _all(gathering)
        # All ranks have read the slot. The newest version is not dropped before the next one begins.
        self._versions.gathered(taken)
        self.gather_seconds = time.perf_counter() - begin

    async def _drop(self, version: int) -> None:
        await self._parts.transport.forget(version)
        await asyncio.gather(*(agent.drop(version) for agent in self._parts.sources))

    def _set_servers(self, servers: Sequence[ServerInfo]) -> None:
        """Starts lanes for new servers and ends the lanes of servers that have left.

        A server that has left and returned since the last call has kept its lane. The rollout
        process no longer knows the version of this server, so the lane announces it again.
        """
        is_start = not self._was_started
        self._was_started = True
        former, self._servers = self._servers, servers
        wanted = {server.url for server in servers}
        for lane in [lane for lane in self.lanes if lane.url not in wanted]:
            logger.info("%s has left the run.", lane.url)
            self.lanes = [other for other in self.lanes if other is not lane]
            self._closing[lane.url] = asyncio.create_task(
                _close_lane(lane, self._tasks.pop(lane.url), self._closing.get(lane.url))
            )
        known = {lane.url: lane for lane in self.lanes}
        for server in servers:
            if server.url in known and server not in former:
                known[server.url].announce()
            elif server.url not in known:
                connection = self._parts.transport.connect(self._parts.make_client(server))
                lane = Lane(
                    connection,
                    self._versions,
                    self._sync,
                    self._attestation,
                    self._listeners,
                    is_initial=is_start,
                )
                self.lanes = [*self.lanes, lane]
                running = _run_after(self._closing.get(lane.url), lane)
                self._tasks[lane.url] = asyncio.create_task(running, name=lane.url)
        self._versions.max_alive = max_alive(self._sync, len(self.lanes))
        self._listeners.on_change()

    def _raise_what_ended(self, listening: "asyncio.Task[None]") -> None:
        self._versions.raise_if_failed()
        for task in (listening, *self._tasks.values()):
            if task.done():
                task.result()

    async def _end(self, listening: "asyncio.Task[None]") -> None:
        closing = [
            _close_lane(lane, self._tasks[lane.url], self._closing.get(lane.url))
            for lane in self.lanes
        ]
        await asyncio.gather(*closing, *self._closing.values())
        await self._versions.close()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await self._parts.close()


def max_alive(sync: WeightSync, num_servers: int) -> int:
    """Resolves ``weight_sync.max_versions``: how many versions may have buffers at once."""
    # These are the newest version, one that is being gathered and, for each server, the version
    # that it still receives together with the base of a delta.
    return sync.max_versions or num_servers * (2 if sync.delta else 1) + 2


async def _all(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Waits for all tasks. If one fails, or the wait is cancelled, the others are cancelled."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _run_after(former: "asyncio.Task[None] | None", lane: Lane) -> None:
    """Runs a lane once a former lane of the same server has left the server."""
    if former is not None:
        await asyncio.wait({former})  # unlike await, this never cancels the former lane's closing
    await lane.run()


async def _close_lane(
    lane: Lane, running: "asyncio.Task[None]", former: "asyncio.Task[None] | None"
) -> None:
    running.cancel()
    if former is not None:
        await asyncio.wait({former})
    await asyncio.gather(running, return_exceptions=True)
    await lane.close()
