# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One push to one server: the requests to it, beside what the sources send.

    consumes        a version that the agents hold, bucket by bucket
    produces        a committed policy version on one server
    waits for       this server and the gathering, each time with a bound
    unblocked by    the server's answer, its death, or a timeout

A connection is joined or it is not. Whatever fails, :meth:`Connection.recover` takes its
groups down, since a collective that one side has given up cannot be completed: join again,
then push again.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.weight_sync.agent import Agent
from torchtitan.grpo.weight_sync.disk_versions import DiskVersions
from torchtitan.grpo.weight_wire.buckets import bucket_bytes
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

logger = logging.getLogger(__name__)

# How long our side's failure waits for the server's own words, which say more.
_GRACE_SECONDS = 2.0
# Buckets that the server is told of while it receives one.
_NUM_AHEAD = 1


@dataclass(frozen=True)
class PushReport:
    """A push that was committed.

    Attributes:
        version: Policy version that the server now serves.
        num_bytes: Sum of the payloads.
        push_seconds: From the first request to the last answer.
        transfer_seconds: Of that, from the first bucket sent to the last received.
        pause_seconds: How long of that the server wrote nothing.
    """

    version: int
    num_bytes: int
    push_seconds: float
    transfer_seconds: float
    pause_seconds: float


class Connection(ABC):
    """The way of the weights to one server.

    Args:
        client: The server; it stays the caller's to close.
    """

    def __init__(self, client: InferenceClient) -> None:
        self.client = client

    @abstractmethod
    async def join(self) -> None:
        """Gets ready to push.

        Raises:
            ServerError: The server cannot join, or did not in time.
        """

    @abstractmethod
    async def prepare(self, version: int) -> None:
        """Gets ready, on our side alone, what every server will be sent.

        Raises:
            VersionNotWritten: It failed; the server is as it was.
        """

    @abstractmethod
    async def push(self, version: int, base: int | None) -> PushReport:
        """Sends one version to the server and makes it serve it.

        Args:
            version: Policy version, which the agents hold or are gathering.
            base: Version that the server has confirmed and the agents still hold: only
                what changed since then is sent. None sends everything.

        Raises:
            ServerError: The server refused or failed, or did not answer in time.
            RuntimeError: Our side failed.
        """

    @abstractmethod
    async def recover(self) -> None:
        """After a failure: gives up on both sides what is under way; the server goes on.

        Bounded in time, whatever the server does. The connection is no longer joined.
        """

    @abstractmethod
    async def close(self) -> None:
        """Leaves; the server is told, and forgets us too."""

    async def _let_go(self, timeout_seconds: float) -> None:
        """Makes the server drop what was ours and write on, if it answers."""
        for step in (self.client.leave_weight_groups, self.client.resume):
            try:
                async with asyncio.timeout(timeout_seconds):
                    await step()
            except (ServerError, TimeoutError) as error:
                # The next join does both again.
                logger.info("%s was not told that it is given up: %s", self.client.url, error)


class GroupConnection(Connection):
    """Over process groups, one with each source rank.

    Args:
        client: The server.
        agents: Of the source ranks, in the order in which they send.
        timeout_seconds: Bound of a join, and of each bucket.
    """

    def __init__(
        self, client: InferenceClient, agents: Sequence[Agent], timeout_seconds: float
    ) -> None:
        super().__init__(client)
        self._agents, self._timeout_seconds = agents, timeout_seconds
        self._group_of: dict[int, str] = {}
        self._is_known = False  # the server may hold a group, an update or a pause of ours

    async def join(self) -> None:
        self._is_known = True
        # A predecessor that was killed may have left an update open or the server paused.
        await self.client.leave_weight_groups()
        await self.client.resume()
        world_size = 1 + await self.client.num_workers()
        for agent in self._agents:
            info = await agent.open(self.client.url, world_size)
            self._group_of[agent.rank] = info.group_name
            await self._beside(agent.join(self.client.url), self.client.join_weight_group(info))

    async def prepare(self, version: int) -> None:
        """Nothing: buckets are gathered while others travel, and a rank that fails ends the run."""

    async def push(self, version: int, base: int | None) -> PushReport:
        client = self.client
        if not self._group_of:
            raise RuntimeError(f"Not in a weight group with {client.url}: join before push.")
        # At hand before the server is stopped for it.
        await self._agents[0].prepare(version, 0, base)
        started = time.monotonic()
        stopped = started
        if client.stops_for == "transfer":
            await client.pause()
        await client.begin_update()
        sending = time.monotonic()
        num_bytes = await self._transfer(version, base)
        sent = time.monotonic()
        if client.stops_for == "commit":
            stopped = sent
            await client.pause()
        stood_still = await client.commit_update(version)
        if client.stops_for != "nothing":
            await client.resume()
            stood_still = time.monotonic() - stopped
        done = time.monotonic()
        return PushReport(version, num_bytes, done - started, sent - sending, stood_still)

    async def _transfer(self, version: int, base: int | None) -> int:
        """Sends all buckets; returns their bytes.

        While one travels, the server is told of the next, so that it need not wait for a
        request between the two. Broadcasts and requests both go out in the buckets' order.
        """
        buckets = [(agent, i) for agent in self._agents for i in range(agent.num_buckets)]
        num_bytes = 0
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            for position, (agent, index) in enumerate(buckets):
                spec = await agent.prepare(version, index, base)
                num_bytes += bucket_bytes(spec)
                if len(under_way) > _NUM_AHEAD:
                    await under_way.popleft()
                exchange = self._beside(
                    agent.send(self.client.url, version, index, base),
                    self._receive(agent, spec, position + 1 == len(buckets), version),
                )
                under_way.append(asyncio.create_task(exchange))
            while under_way:
                await under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        return num_bytes

    async def _receive(self, agent: Agent, spec: BucketSpec, last: bool, version: int) -> None:
        await self.client.receive_bucket(
            spec, group_name=self._group_of[agent.rank], last=last, version=version
        )

    async def recover(self) -> None:
        # At the same time: the server's end closes the sockets that our broadcast waits on,
        # and ours aborts what NCCL's watchdog would end this process for.
        _, taken_down = await asyncio.gather(
            self._let_go(self._timeout_seconds), self._take_down(), return_exceptions=True
        )
        if isinstance(taken_down, Exception):
            # Of a communicator that broke; there is nothing left to keep.
            logger.warning("Leaving the groups with %s: %s", self.client.url, taken_down)
        self._is_known = False

    async def close(self) -> None:
        if self._is_known:  # also where recovering was broken off
            await self.recover()

    async def _beside(self, ours, theirs) -> None:
        """Our side of a collective, and the request for the server's, at the same time.

        Raises what fails first: when the server refuses, our side would wait in vain.
        Neither may outlast the timeout by more than the control request's own.
        """
        tasks = own, other = asyncio.ensure_future(ours), asyncio.ensure_future(theirs)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if own.done() and own.exception() is not None and not other.done():
                # The server's own words are the better explanation, if they come soon.
                await asyncio.wait({other}, timeout=_GRACE_SECONDS)
            if other.done():
                other.result()
            own.result()
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_retrieve)

    async def _take_down(self) -> None:
        """Leaves the groups on our side; harmless when there are none."""
        self._group_of.clear()
        await asyncio.gather(*(agent.leave(self.client.url) for agent in self._agents))


class DiskConnection(Connection):
    """Through files that the trainer writes and the server reads.

    Args:
        client: The server.
        versions: Writes each version once, for all servers.
        timeout_seconds: Bound of writing a version, and of the server's loading it.
    """

    def __init__(
        self, client: InferenceClient, versions: DiskVersions, timeout_seconds: float
    ) -> None:
        super().__init__(client)
        self._versions, self._timeout_seconds = versions, timeout_seconds

    async def join(self) -> None:
        # A predecessor that was killed may have left an update open or the server paused.
        await self.client.leave_weight_groups()
        await self.client.resume()

    async def prepare(self, version: int) -> None:
        await self._versions.written(version, self._timeout_seconds)

    async def push(self, version: int, base: int | None) -> PushReport:
        started = time.monotonic()
        path, num_bytes = await self._versions.written(version, self._timeout_seconds)
        written = time.monotonic()
        stops = self.client.stops_for != "nothing"
        if stops:
            await self.client.pause()
        async with asyncio.timeout(self._timeout_seconds):
            stood_still = await self.client.update_from_disk(str(path), version)
        if stops:
            await self.client.resume()
            stood_still = time.monotonic() - written
        seconds = time.monotonic() - started
        return PushReport(version, num_bytes, seconds, seconds, stood_still)

    async def recover(self) -> None:
        await self._let_go(self._timeout_seconds)

    async def close(self) -> None:
        # It may have been stopped for an update that was broken off.
        await self._let_go(self._timeout_seconds)


def _retrieve(task: asyncio.Future) -> None:
    # An error that came second is not an unretrieved one.
    if not task.cancelled():
        task.exception()
