# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One push to one server: the requests to it, beside what the sources send.

    consumes        a version that the agents hold, bucket by bucket
    produces        a committed policy version on one server
    waits for       this server and the gathering, each time with a bound
    unblocked by    the server's answer, its death, or a timeout

A connection is joined or it is not. Whatever fails takes its groups down, since a
collective that one side has given up cannot be completed: join again, then push again.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torchtitan.grpo.inference.client import BucketSpec, InferenceClient, ServerError
from torchtitan.grpo.weight_sync.agent import Agent
from torchtitan.grpo.weight_sync.disk_versions import DiskVersions
from torchtitan.grpo.weight_sync.payloads import payload_bytes

logger = logging.getLogger(__name__)

# How long our side's failure waits for the server's own words, which say more.
_GRACE_SECONDS = 2.0


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
        """Gets ready to push, after taking down what there was before.

        Raises:
            ServerError: The server cannot join, or did not in time.
        """

    @abstractmethod
    async def push(self, version: int, base: int | None) -> PushReport:
        """Sends one version to the server and makes it serve it.

        The server is resumed whatever happens. After a failure the connection is no longer
        joined.

        Args:
            version: Policy version, which the agents hold or are gathering.
            base: Version that the server has confirmed and the agents still hold: only
                what changed since then is sent. None sends everything.

        Raises:
            ServerError: The server refused or failed, or did not answer in time.
            RuntimeError: Our side failed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Leaves; the server is told, and forgets us too."""

    async def _resume_after(self, error: BaseException, timeout_seconds: float) -> None:
        """Lets the server go on; what fails in this is added to the error."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.client.resume()
        except (ServerError, TimeoutError) as further:
            error.add_note(f"Resuming the server failed, too: {further!r}")


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

    async def join(self) -> None:
        if self._group_of:
            await self._take_down()
        # A predecessor that was killed may have left an update open or the server paused.
        await self.client.leave_weight_groups()
        await self.client.resume()
        world_size = 1 + await self.client.num_workers()
        try:
            for agent in self._agents:
                info = await agent.open(self.client.url, world_size)
                self._group_of[agent.rank] = info.group_name
                await self._beside(agent.join(self.client.url), self.client.join_weight_group(info))
        except BaseException:
            await asyncio.shield(self._take_down())
            raise

    async def push(self, version: int, base: int | None) -> PushReport:
        if not self._group_of:
            raise RuntimeError(f"Not in a weight group with {self.client.url}: join before push.")
        try:
            return await self._push(version, base)
        except BaseException as error:
            await asyncio.shield(self._recover(error))
            raise

    async def _push(self, version: int, base: int | None) -> PushReport:
        client = self.client
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
        buckets = [(agent, i) for agent in self._agents for i in range(agent.num_buckets)]
        num_bytes = 0
        for position, (agent, index) in enumerate(buckets):
            spec = await agent.prepare(version, index, base)
            num_bytes += payload_bytes(spec)
            await self._beside(
                agent.send(self.client.url, version, index, base),
                self._receive(agent, spec, position + 1 == len(buckets), version),
            )
        return num_bytes

    async def _receive(self, agent: Agent, spec: BucketSpec, last: bool, version: int) -> None:
        await self.client.receive_bucket(
            spec, group_name=self._group_of[agent.rank], last=last, version=version
        )

    async def close(self) -> None:
        if self._group_of:
            try:
                await self.client.leave_weight_groups()
            except ServerError as error:
                logger.warning("%s was not told that the trainer left: %s", self.client.url, error)
        await self._take_down()

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

    async def _recover(self, error: BaseException) -> None:
        """Ends the update and the groups on both sides, then lets the server go on."""
        leaving = asyncio.ensure_future(self._take_down())
        # At the same time: the server's end closes the sockets that our broadcast waits on,
        # and ours aborts what NCCL's watchdog would end this process for.
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self.client.leave_weight_groups()
        except (ServerError, TimeoutError) as further:
            error.add_note(f"Leaving the server's groups failed, too: {further!r}")
        await self._resume_after(error, self._timeout_seconds)
        await leaving

    async def _take_down(self) -> None:
        """Leaves the groups on our side; harmless when there are none."""
        self._group_of.clear()
        await asyncio.gather(*(agent.leave(self.client.url) for agent in self._agents))


class DiskConnection(Connection):
    """Through files that the trainer writes and the server reads.

    Args:
        client: The server.
        versions: Writes each version once, for all servers.
        timeout_seconds: Bound of writing a version.
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

    async def push(self, version: int, base: int | None) -> PushReport:
        started = time.monotonic()
        path, num_bytes = await self._versions.written(version, self._timeout_seconds)
        written = time.monotonic()
        async with self._stopped():
            stood_still = await self.client.update_from_disk(str(path), version)
        done = time.monotonic()
        if self.client.stops_for != "nothing":
            stood_still = done - written
        return PushReport(version, num_bytes, done - started, done - started, stood_still)

    @asynccontextmanager
    async def _stopped(self) -> AsyncIterator[None]:
        if self.client.stops_for == "nothing":
            yield
            return
        try:
            await self.client.pause()
            yield
        except BaseException as error:
            await asyncio.shield(self._resume_after(error, self._timeout_seconds))
            raise
        await self.client.resume()

    async def close(self) -> None:
        """Nothing is held."""


def _retrieve(task: asyncio.Future) -> None:
    # An error that came second is not an unretrieved one.
    if not task.cancelled():
        task.exception()
