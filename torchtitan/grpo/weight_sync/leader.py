# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rank 0's part of the push: has versions gathered, and keeps a lane for each server.

    consumes        filled slots
    produces        versions that the sources hold, for the lanes
    waits for       a filled slot; all ranks' copies and shards; room for a further version
    unblocked by    the training threads; `weight_sync.timeout_seconds`

All of it runs in one event loop, on the publisher's thread.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.agent import Agent
from torchtitan.grpo.weight_sync.connection import Connection
from torchtitan.grpo.weight_sync.disk_versions import DiskVersions
from torchtitan.grpo.weight_sync.lane import Lane, LaneSettings, Listeners
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.versions import Versions

logger = logging.getLogger(__name__)

# How often an idle leader looks whether it should end, and whether servers have changed.
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LeaderParts:
    """What a leader is put together from, within the publisher's event loop.

    Attributes:
        agents: Of all ranks, in their order.
        make_connection: To one server.
        disk: Where versions are written; None where process groups are used.
        listen: Hears the other ranks' answers until cancelled.
        close: Ends what the above have opened.
    """

    agents: Sequence[Agent]
    make_connection: Callable[[ServerInfo], Connection]
    disk: DiskVersions | None
    listen: Callable[[], "asyncio.Task[None]"]
    close: Callable[[], Awaitable[None]]


class Leader:
    """See the module's docstring.

    Args:
        slots: Their states.
        parts: See there.
        settings: Of the lanes.
        listeners: Of the lanes.
        max_versions: ``weight_sync.max_versions``.
        servers: The servers at the start.
        changed_servers: Asked from time to time; all servers, once they have changed.

    Attributes:
        lanes: One for each server that belongs to the run.
        gather_seconds: Of the last version.
        error: What has ended :meth:`run`, while it still clears up, too.
        num_versions: Versions that have buffers now.
    """

    def __init__(
        self,
        slots: SlotTable,
        parts: LeaderParts,
        settings: LaneSettings,
        listeners: Listeners,
        max_versions: int,
        servers: Sequence[ServerInfo],
        changed_servers: Callable[[], list[ServerInfo] | None],
    ) -> None:
        self.lanes: list[Lane] = []
        self.gather_seconds = 0.0
        self.error: BaseException | None = None
        self._slots, self._parts = slots, parts
        self._settings, self._listeners = settings, listeners
        self._max_versions = max_versions
        self._servers, self._changed_servers = servers, changed_servers
        self._versions = Versions(max_alive(max_versions, len(servers), settings.delta), self._drop)
        self._slot_of: dict[int, int] = {}  # of versions that are sent from their slots
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="weight-slots")

    @property
    def num_versions(self) -> int:
        """Versions that have buffers now."""
        return self._versions.num_alive

    async def run(self, should_end: Callable[[], bool]) -> None:
        """Works until asked to end; raises what ends a lane or the gathering."""
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
        """The newest filled slot, if there is one and room for it."""
        if not await self._versions.room(_POLL_SECONDS):
            return
        loop = asyncio.get_running_loop()
        taken = await loop.run_in_executor(self._waiting, self._slots.take_newest, _POLL_SECONDS)
        if taken is None:
            return
        slot, version = taken
        is_held = self._slots.can_hold()
        begin = time.perf_counter()
        agents = self._parts.agents
        # Until then no server hears of the version: it would wait amid a push for a rank that
        # is behind, or, where they share a host, take cores at that rank's boundary.
        await _all([asyncio.create_task(agent.wait_copied(slot, version)) for agent in agents])
        gathering = [
            asyncio.create_task(agent.gather(slot, version, is_held), name=f"gather-{agent.rank}")
            for agent in agents
        ]
        # The sources have room for it before any lane asks.
        await asyncio.sleep(0)
        await self._versions.begin(version)
        await _all(gathering)
        # Every rank is done with the slot. What is newest is not dropped before the next begins.
        if is_held:
            self._slots.hold(slot)
            self._slot_of[version] = slot
        else:
            self._slots.release(slot)
        self.gather_seconds = time.perf_counter() - begin

    async def _drop(self, version: int) -> None:
        if self._parts.disk is not None:
            await self._parts.disk.remove(version)
        sources = (agent for agent in self._parts.agents if agent.num_buckets)
        await asyncio.gather(*(agent.drop(version) for agent in sources))
        if version in self._slot_of:
            self._slots.release(self._slot_of.pop(version))

    def _set_servers(self, servers: Sequence[ServerInfo]) -> None:
        """Begins lanes of new servers and ends those of servers that are gone.

        One that went and came back since the last look has kept its lane, but nobody else
        remembers what it serves.
        """
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
                connection = self._parts.make_connection(server)
                lane = Lane(connection, self._versions, self._settings, self._listeners)
                self.lanes = [*self.lanes, lane]
                running = _run_after(self._closing.get(lane.url), lane)
                self._tasks[lane.url] = asyncio.create_task(running, name=lane.url)
        self._versions.max_alive = max_alive(
            self._max_versions, len(self.lanes), self._settings.delta
        )
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
        self._waiting.shutdown(wait=False, cancel_futures=True)
        await self._parts.close()


def max_alive(setting: int, num_servers: int, delta: bool) -> int:
    """Resolves ``weight_sync.max_versions``: how many versions may have buffers at once."""
    # The newest, one that is being gathered, and for each server one that it still receives,
    # with the version that its changes are against.
    return setting or num_servers * (2 if delta else 1) + 2


async def _all(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Waits for all; when one fails, or the wait is cancelled, the others are cancelled."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _run_after(former: "asyncio.Task[None] | None", lane: Lane) -> None:
    """Serves a lane once a former one of the same server has left its groups."""
    if former is not None:
        await asyncio.wait({former})  # which goes on if this is cancelled
    await lane.run()


async def _close_lane(
    lane: Lane, running: "asyncio.Task[None]", former: "asyncio.Task[None] | None"
) -> None:
    running.cancel()
    if former is not None:
        await asyncio.wait({former})
    await asyncio.gather(running, return_exceptions=True)
    await lane.close()
