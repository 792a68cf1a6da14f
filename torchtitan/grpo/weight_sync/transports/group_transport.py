# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sends versions over process groups, one between each source rank and each server.

One push:

    consumes        a version that the source ranks hold, bucket by bucket
    produces        a committed policy version on one server
    waits for       that server and the gathering, each time with a timeout
    unblocked by    the server's answer, its death, or the timeout

A collective that one side has abandoned cannot be completed. After any failure, all groups with
the server are therefore taken down, and the connection must be joined again before the next
push.
"""

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest

import torch

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.system.rank_calls import operation
from torchtitan.grpo.weight_sync.payloads import Bucket, PayloadPool
from torchtitan.grpo.weight_sync.slot_layout import PushPlan
from torchtitan.grpo.weight_sync.transports.group_end import GroupEnd, GroupSettings
from torchtitan.grpo.weight_sync.transports.interface import (
    Connection,
    PushReport,
    Sender,
    Transport,
)
from torchtitan.grpo.weight_wire import sparse
from torchtitan.grpo.weight_wire.buckets import bucket_bytes, element_counts
from torchtitan.grpo.weight_wire.group_facts import (
    BackendChoice,
    GroupFacts,
    GroupTransportName,
    choose_backend,
)
from torchtitan.grpo.weight_wire.process_group import own_group_facts
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

logger = logging.getLogger(__name__)

# When the trainer's side fails, it waits this long for the server's own error, which says more.
_GRACE_SECONDS = 2.0
# Number of further buckets that are announced to the server while it receives a bucket.
_NUM_AHEAD = 1


class GroupSender(Sender):
    def __init__(self, rank: int, pool: PayloadPool, settings: GroupSettings) -> None:
        super().__init__(rank, pool)
        self._settings = settings
        self._ends: dict[str, GroupEnd] = {}
        # Deltas take long to encode, so a thread encodes them. It waits for no other process.
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="weight-encode")

    @operation
    async def prepare(self, version: int, index: int, base: int | None) -> BucketSpec:
        """Waits until a bucket is gathered and encoded, as a delta if there is a ``base``."""
        with self.pool.reading(version) as payload:
            await payload.wait_filled(index, self._settings.timeout_seconds)
            if base is None:
                return payload.bucket(index).spec
            encode = functools.partial(self._encode, version, index, base)
            return await asyncio.get_running_loop().run_in_executor(self._encoding, encode)

    def _encode(self, version: int, index: int, base: int) -> BucketSpec:
        with self.pool.reading(version) as new, self.pool.reading(base) as old:
            if (base, index) not in new.deltas:
                previous, current = old.bucket(index), new.bucket(index)
                counts = element_counts(current.spec)
                delta, num_changed = sparse.encode(previous.payload, current.payload, *counts)
                spec = replace(current.spec, num_changed=num_changed, base_version=base)
                new.deltas[base, index] = Bucket(spec, delta)
            return new.deltas[base, index].spec

    @operation
    async def group_facts(self) -> GroupFacts:
        return own_group_facts(self._settings.device)

    @operation
    async def open(
        self, server_url: str, world_size: int, backend: str, in_pieces: bool
    ) -> WeightGroupInfo:
        """Closes this server's earlier group, if any, and makes a new one, which nobody has joined yet."""
        await self.leave(server_url)
        end = GroupEnd(server_url, world_size, backend, self._settings, in_pieces=in_pieces)
        self._ends[server_url] = end
        return end.info

    @operation
    async def join(self, server_url: str) -> None:
        """Joins the group, and returns when the server has joined too."""
        await self._end(server_url).join()

    @operation
    async def send(self, server_url: str, version: int, index: int, base: int | None) -> None:
        """Broadcasts a bucket to a server, after :meth:`prepare` has described it."""

        def read(broadcast: Callable[[torch.Tensor], None]) -> None:
            with self.pool.reading(version) as payload:
                bucket = payload.bucket(index) if base is None else payload.deltas[base, index]
                broadcast(bucket.payload)

        await self._end(server_url).send(read)

    @operation
    async def leave(self, server_url: str) -> None:
        end = self._ends.pop(server_url, None)
        if end is not None:
            await end.leave()

    async def close(self) -> None:
        await asyncio.gather(*(self.leave(url) for url in list(self._ends)))
        self._encoding.shutdown(wait=False, cancel_futures=True)

    def _end(self, server_url: str) -> GroupEnd:
        if server_url not in self._ends:
            raise RuntimeError(
                f"Rank {self.rank} must open a group with {server_url} before it uses the group."
            )
        return self._ends[server_url]


class NcclImpossible(ServerError):
    """``weight_sync.transport`` requires NCCL, which cannot reach the server."""


class Handshake:
    """Chooses the backend of the groups with a server, the same for all source ranks.

    Chooses again at each join: a server may return with another version of NCCL or on another GPU.
    """

    def __init__(self, client: InferenceClient, transport: GroupTransportName) -> None:
        self._client = client
        self._transport: GroupTransportName = transport
        self._last: BackendChoice | None = None

    async def backend(self, senders: Sequence[GroupSender]) -> str:
        """Returns ``nccl`` or ``gloo``. Raises NcclImpossible if NCCL is required and cannot be used."""
        if self._transport == "host":
            return "gloo"
        ours = await asyncio.gather(*(sender.group_facts() for sender in senders))
        choice = choose_backend(self._transport, ours, await self._client.group_facts())
        if choice.backend is None:
            raise NcclImpossible(
                f"{self._client.url} cannot receive weights over NCCL, which weight_sync.transport = "
                f"'nccl' requires: {' '.join(choice.obstacles)} Alternatively, set "
                "weight_sync.transport = 'auto' or 'host'."
            )
        if choice != self._last:
            self._last = choice
            self._tell(choice)
        return choice.backend

    def _tell(self, choice: BackendChoice) -> None:
        url, is_nccl = self._client.url, choice.backend == "nccl"
        if choice.obstacles:
            logger.warning(
                "%s receives weights from host memory over gloo, because NCCL cannot be used: %s "
                "Alternatively, set weight_sync.transport = 'host', which does not need NCCL.",
                url, " ".join(choice.obstacles),
            )  # fmt: skip
        elif choice.doubts and not is_nccl:
            logger.warning(
                "%s receives weights from host memory over gloo, because it is not known whether "
                "NCCL can be used: %s Set weight_sync.transport = 'nccl' to use it nevertheless, "
                "or 'host' to keep host memory without this warning.",
                url, " ".join(choice.doubts),
            )  # fmt: skip
        elif choice.doubts:
            logger.warning(
                "%s receives weights over NCCL, as weight_sync.transport = 'nccl' requires, but it "
                "is not known whether NCCL can be used: %s If the first push fails, set "
                "weight_sync.transport = 'host'.",
                url, " ".join(choice.doubts),
            )  # fmt: skip
        else:
            over = "NCCL" if is_nccl else "gloo, from host memory"
            logger.info("%s receives weights over %s.", url, over)


class GroupTransport(Transport[GroupSender]):
    sender_type = GroupSender

    def __init__(self, plan: PushPlan, settings: GroupSettings) -> None:
        self._plan, self._settings = plan, settings
        self._senders: Sequence[GroupSender] = ()

    def describe(self) -> str:
        if self._settings.transport == "host":
            return "from host memory over gloo"
        over = "over NCCL" if self._settings.transport == "nccl" else "over NCCL or gloo"
        return f"{over} (weight_sync.transport = '{self._settings.transport}')"

    def make_sender(self, rank: int, pool: PayloadPool) -> GroupSender:
        return GroupSender(rank, pool, self._settings)

    async def lead(self, senders: Sequence[GroupSender]) -> None:
        self._senders = senders

    def connect(self, client: InferenceClient) -> "GroupConnection":
        return GroupConnection(
            client,
            self._senders,
            {source.rank: len(source.buckets) for source in self._plan.sources},
            self._settings.timeout_seconds,
            self._settings.transport,
        )


class GroupConnection(Connection):
    """The groups of all source ranks with one server.

    ``num_buckets`` is by source rank. ``timeout_seconds`` bounds each join and each bucket's transfer.
    """

    def __init__(
        self,
        client: InferenceClient,
        senders: Sequence[GroupSender],
        num_buckets: Mapping[int, int],
        timeout_seconds: float,
        transport: GroupTransportName,
    ) -> None:
        super().__init__(client)
        self._handshake = Handshake(client, transport)
        self._senders, self._num_buckets = senders, num_buckets
        self._timeout_seconds = timeout_seconds
        self._group_of: dict[int, str] = {}
        # Whether the server may hold a group, an update or a pause of this connection.
        self._is_known = False

    async def join(self) -> None:
        self._is_known = True
        # A trainer that was killed earlier may have left an update open or the server paused.
        await self.client.leave_weight_groups()
        await self.client.resume()
        world_size = 1 + await self.client.num_workers()
        backend = await self._handshake.backend(self._senders)
        for sender in self._senders:
            in_pieces = self.client.capabilities.receives_pieces
            info = await sender.open(self.client.url, world_size, backend, in_pieces)
            self._group_of[sender.rank] = info.group_name
            await self._beside(sender.join(self.client.url), self.client.join_weight_group(info))

    async def prepare(self, version: int) -> None:
        """Does nothing, because each bucket is gathered while earlier buckets are being sent."""

    async def push(self, version: int, base: int | None) -> PushReport:
        client = self.client
        if not self._group_of:
            raise RuntimeError(f"The weight group with {client.url} must be joined before a push.")
        # The first bucket must be ready before the server is stopped for it.
        await self._senders[0].prepare(version, 0, base)
        started = time.monotonic()
        stopped = started
        if client.capabilities.stops_for == "transfer":
            await client.pause()
        await client.begin_update()
        sending = time.monotonic()
        num_bytes = await self._transfer(version, base)
        sent = time.monotonic()
        if client.capabilities.stops_for == "commit":
            stopped = sent
            await client.pause()
        stood_still = await client.commit_update(version)
        if client.capabilities.stops_for != "nothing":
            await client.resume()
            stood_still = time.monotonic() - stopped
        done = time.monotonic()
        return PushReport(version, num_bytes, done - started, sent - sending, stood_still)

    async def _transfer(self, version: int, base: int | None) -> int:
        """Sends all buckets and returns their total number of bytes.

        Source ranks send at the same time if the server can receive from several at once. Otherwise
        they take turns, one bucket each, so that no source is busy for long.
        """
        of_source = [
            [(sender, index) for index in range(self._num_buckets[sender.rank])]
            for sender in self._senders
        ]
        if self.client.capabilities.receives_in_parallel:
            chains = of_source
        else:
            in_turn = zip_longest(*of_source)
            chains = [[bucket for buckets in in_turn for bucket in buckets if bucket is not None]]
        sending = [
            asyncio.create_task(self._send_chain(c, version, base, marks_last=len(chains) == 1))
            for c in chains
        ]
        try:
            return sum(await asyncio.gather(*sending))
        finally:
            await _end_all(sending)

    async def _send_chain(
        self,
        buckets: Sequence[tuple[GroupSender, int]],
        version: int,
        base: int | None,
        *,
        marks_last: bool,
    ) -> int:
        """Sends buckets one after another and returns their total number of bytes.

        A bucket is announced while the one before it is sent, so the server never waits in between.
        """
        num_bytes = 0
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            for position, (sender, index) in enumerate(buckets):
                spec = await sender.prepare(version, index, base)
                num_bytes += bucket_bytes(spec)
                if len(under_way) > _NUM_AHEAD:
                    await under_way.popleft()
                is_last = marks_last and position + 1 == len(buckets)
                exchange = self._exchange(sender, spec, index, is_last, version, base)
                under_way.append(asyncio.create_task(exchange))
            while under_way:
                await under_way.popleft()
        finally:
            await _end_all(under_way)
        return num_bytes

    async def _exchange(
        self,
        sender: GroupSender,
        spec: BucketSpec,
        index: int,
        is_last: bool,
        version: int,
        base: int | None,
    ) -> None:
        group_name = self._group_of[sender.rank]
        await self._beside(
            sender.send(self.client.url, version, index, base),
            self.client.receive_bucket(spec, group_name=group_name, last=is_last, version=version),
        )

    async def recover(self) -> None:
        # Both sides leave at the same time: the server closes the sockets on which a gloo
        # broadcast of this side waits, and this side aborts NCCL communicators, whose kernels
        # would otherwise wait without end.
        _, taken_down = await asyncio.gather(
            self.release_server(self._timeout_seconds), self._take_down(), return_exceptions=True
        )
        if isinstance(taken_down, Exception):
            # The communicator is broken, and no part of it is needed any more.
            logger.warning("Leaving the groups with %s failed: %s", self.client.url, taken_down)
        self._is_known = False

    async def close(self) -> None:
        if self._is_known:  # this is also True after a recovery that was cancelled
            await self.recover()

    async def _beside(self, ours, theirs) -> None:
        """Runs this side's part of a collective while the server is asked to run its part.

        The first failure is raised, because this side would otherwise wait for a server that has refused.
        Each part has its own timeout.
        """
        own, other = asyncio.ensure_future(ours), asyncio.ensure_future(theirs)
        try:
            await asyncio.wait((own, other), return_when=asyncio.FIRST_EXCEPTION)
            if own.done() and own.exception() is not None and not other.done():
                # The server's own error explains more, if it arrives soon.
                await asyncio.wait({other}, timeout=_GRACE_SECONDS)
            if other.done():
                other.result()
            own.result()
        finally:
            _give_up(own)
            _give_up(other)
            # Otherwise the raised error and this frame would keep each other alive.
            del own, other

    async def _take_down(self) -> None:
        self._group_of.clear()
        await asyncio.gather(*(sender.leave(self.client.url) for sender in self._senders))


async def _end_all(tasks: MutableSequence[asyncio.Task]) -> None:
    """Cancels tasks, waits until they have ended, and empties the sequence ``tasks``."""
    for task in tasks:
        task.cancel()
    try:
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        # A task's error and a frame that holds the task could otherwise keep each other alive.
        tasks.clear()


def _give_up(task: asyncio.Future) -> None:
    task.cancel()
    # The second of two errors is retrieved, so that asyncio does not log it.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
