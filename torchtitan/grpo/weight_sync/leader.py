# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rank 0's loop: makes all ranks gather versions, and runs a lane for each server.

    consumes        filled slots
    produces        versions that the source ranks hold, for the lanes
    waits for       a filled slot; all ranks' copies and shards; room for another version
    unblocked by    the training threads; `weight_sync.timeout_seconds`

The leader runs in one event loop, on the publisher's thread.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.system.rank_calls import Served
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.attestation import Attestation
from torchtitan.grpo.weight_sync.gather import Agent
from torchtitan.grpo.weight_sync.lane import Lane, Listeners
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.transports.interface import Sender, Transport
from torchtitan.grpo.weight_sync.versions import Versions

logger = logging.getLogger(__name__)

# Interval at which an idle leader checks whether it should end.
_POLL_SECONDS = 0.2
# Interval at which it looks for changed servers, also while a version is gathered: a lent server must
# not be put to sleep late.
_LOOK_SECONDS = 0.02
# Other servers than the pinned one may lag behind for this time or, if it is longer, for this many
# times the duration of their last push.
_PATIENCE_SECONDS = 10.0
_PATIENCE_PUSHES = 4


@dataclass(frozen=True)
class LeaderParts:
    """The ``agents`` of all ranks and ``senders`` of all sources. The leader closes ``own``, rank 0's."""

    agents: Sequence[Agent]
    sources: Sequence[Agent]
    senders: Sequence[Sender]
    own: Sequence[Served]
    transport: Transport[Any]
    make_client: Callable[[ServerInfo], InferenceClient]


class Leader:
    """See the module's docstring.

    ``changed_servers`` returns all servers if they have changed since the last call. ``error`` is what
    ended :meth:`run`; it is set before :meth:`run` closes the lanes.
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
        self.pin = Pin()
        self.gather_seconds = 0.0
        self.error: BaseException | None = None
        self._slots, self._parts = slots, parts
        self._sync, self._attestation, self._listeners = sync, attestation, listeners
        self._servers, self._changed_servers = servers, changed_servers
        self.versions = Versions(slots, max_alive(sync, len(servers)), self._drop)
        self._was_started = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}

    async def run(self, should_end: Callable[[], bool]) -> None:
        """Leads the push until ``should_end`` returns True. Raises an error in a lane or in gathering."""
        watching: asyncio.Task[None] | None = None
        try:
            await self._parts.transport.lead(self._parts.senders)
            self._set_servers(self._servers)
            watching = asyncio.create_task(self._watch_servers(), name="servers")
            while not should_end():
                self._raise_what_ended(watching)
                await self._gather_next()
        except BaseException as error:
            self.error = error
            raise
        finally:
            if watching is not None:
                watching.cancel()
            await self._end()

    async def _watch_servers(self) -> None:
        while True:
            if (servers := self._changed_servers()) is not None:
                self._set_servers(servers)
            self.pin.yield_if_needed(self.lanes, self._slots.published)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _gather_next(self) -> None:
        taken = await self.versions.take_newest(_POLL_SECONDS)
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
        await self.versions.begin(version)
        await _all(gathering)
        # All ranks have read the slot. The newest version is not dropped before the next one begins.
        self.versions.gathered(taken)
        self.gather_seconds = time.perf_counter() - begin

    async def _drop(self, version: int) -> None:
        await self._parts.transport.forget(version)
        await asyncio.gather(*(agent.drop(version) for agent in self._parts.sources))

    def _set_servers(self, servers: Sequence[ServerInfo]) -> None:
        """Starts lanes for new servers and ends the lanes of servers that have left.

        A server that left and returned since the last call keeps its lane, which announces its
        version again to the rollout process.
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
            if server.url in known:
                known[server.url].set_wanted(server.is_wanted)
                if server not in former:
                    known[server.url].announce()
            else:
                connection = self._parts.transport.connect(self._parts.make_client(server))
                lane = Lane(
                    connection,
                    self.versions,
                    self._sync,
                    self._attestation,
                    self._listeners,
                    is_initial=is_start,
                    is_lent=server.is_lent,
                )
                lane.set_wanted(server.is_wanted)
                self.lanes = [*self.lanes, lane]
                running = _run_after(self._closing.get(lane.url), lane)
                self._tasks[lane.url] = asyncio.create_task(running, name=lane.url)
        self.versions.max_alive = max_alive(self._sync, len(self.lanes))
        self._listeners.on_change()

    def _raise_what_ended(self, watching: "asyncio.Task[None]") -> None:
        self.versions.raise_if_failed()
        for task in (watching, *self._tasks.values()):
            if task.done():
                task.result()

    async def _end(self) -> None:
        closing = [
            _close_lane(lane, self._tasks[lane.url], self._closing.get(lane.url))
            for lane in self.lanes
        ]
        await asyncio.gather(*closing, *self._closing.values())
        await self.versions.close()
        for one in self._parts.own:
            await one.close()


class Pin:
    """Keeps a server at the weights of an evaluation as long as training does not need the server.

        free --- set ---> pinned --- set(None), or the server is gone ---> free
                            |
                            +------- yield_if_needed --------------------> free

    The rollouts of a pinned server become too old for training, so the pin ends if no other
    server takes the new weights meanwhile. Any thread may use a pin.
    """

    def __init__(self) -> None:
        self._lane: Lane | None = None
        self._lock = threading.Lock()
        self._progress = (-1, 0.0)  # newest version of the other servers, and time of its arrival

    @property
    def url(self) -> str | None:
        lane = self._lane
        return lane.url if lane is not None else None

    def set(self, lanes: Sequence[Lane], version: int | None) -> None:
        """Pins the server with the newest version in place of the one that was pinned before.

        The server keeps the first version not older than ``version``. ``None`` pins no server.
        """
        with self._lock:
            self._release()
            # A server that is still starting does not count, because the pinned server would then
            # have to generate all rollouts.
            able = [lane for lane in lanes if _is_able(lane)]
            if version is not None and len(able) >= 2:
                chosen = max(able, key=lambda lane: lane.version)  # it reaches the version first
                chosen.held_from, self._lane = version, chosen
                self._progress = (-1, time.monotonic())

    def yield_if_needed(self, lanes: Sequence[Lane], published: int) -> None:
        """Ends the pin if no other server takes new weights; ``published`` is the newest version."""
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
    return lane.version >= 0 and not lane.is_blocked


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
