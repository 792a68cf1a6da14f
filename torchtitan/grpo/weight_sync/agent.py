# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a rank does for the leader: gathers, and as a source sends to servers.

Every rank has one agent. The leader, rank 0, calls its own directly and those of other
ranks over a channel (see `channel.py`); the two look the same to it. Each method belongs
to the event loop of the publisher's thread; what blocks runs on threads of its own, one
for gathering and one for each server.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from torchtitan.grpo.weight_sync.disk import write_part
from torchtitan.grpo.weight_sync.gather import Gatherer
from torchtitan.grpo.weight_sync.group_end import GroupEnd, GroupSettings
from torchtitan.grpo.weight_sync.payloads import Bucket, Payload, PayloadPool
from torchtitan.grpo.weight_sync.slot_layout import Shards
from torchtitan.grpo.weight_wire import sparse
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

_POLL_SECONDS = 0.02

ReadSnapshot = Callable[[int, int], Shards]
"""From slot and version to this rank's shards; waits until the slot holds the version."""


class Agent(Protocol):
    """An agent as the leader sees it, of its own rank or of another."""

    rank: int
    num_buckets: int
    """What this rank sends of each version; 0 where it is no source."""

    async def wait_copied(self, slot: int, version: int) -> None:
        """Returns when this rank's shards of a version lie in a slot."""
        ...

    async def gather(self, slot: int, version: int, is_held: bool) -> None:
        """Takes part in gathering a version; sources hold it until :meth:`drop`.

        Args:
            slot: Where all ranks have their shards.
            version: Policy version.
            is_held: Nobody writes the slot until the version is dropped: it may be sent from
                there. Otherwise the slot is written again once all ranks are done.
        """
        ...

    async def drop(self, version: int) -> None:
        """Returns when nobody reads the version any more and its buffers are free."""
        ...

    async def prepare(self, version: int, index: int, base: int | None) -> BucketSpec:
        """Waits until a bucket is gathered; describes it, as changes to ``base`` if given."""
        ...

    async def open(self, server_url: str, world_size: int) -> WeightGroupInfo:
        """Makes a group with a server, after taking down a former one; joined by nobody yet."""
        ...

    async def join(self, server_url: str) -> None:
        """Joins that group; returns when the server has, too."""
        ...

    async def send(self, server_url: str, version: int, index: int, base: int | None) -> None:
        """Broadcasts a prepared bucket over that group."""
        ...

    async def leave(self, server_url: str) -> None:
        """Takes that group down; harmless when there is none."""
        ...

    async def write(self, version: int, directory: str) -> None:
        """Writes this rank's share of a version into a directory."""
        ...


class LocalAgent:
    """The agent of this rank.

    Args:
        rank: This rank.
        gatherer: Its part in the gathering.
        read_snapshot: Where its shards come from.
        pool: What it holds as a source; None where it is none.
        settings: Of its groups with servers.

    Attributes:
        rank: As given.
        num_buckets: See :class:`Agent`.
    """

    def __init__(
        self,
        rank: int,
        gatherer: Gatherer,
        read_snapshot: ReadSnapshot,
        pool: PayloadPool | None,
        settings: GroupSettings,
    ) -> None:
        self.rank = rank
        self.num_buckets = len(gatherer.own.buckets) if gatherer.own is not None else 0
        self._gatherer, self._read_snapshot = gatherer, read_snapshot
        self._pool, self._settings = pool, settings
        self._ends: dict[str, GroupEnd] = {}
        self._gathering = ThreadPoolExecutor(1, thread_name_prefix="weight-gather")
        # Deltas, checksums, files: what takes long and waits for nobody.
        self._working = ThreadPoolExecutor(1, thread_name_prefix="weight-encode")

    async def wait_copied(self, slot: int, version: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._gathering, self._read_snapshot, slot, version)

    async def gather(self, slot: int, version: int, is_held: bool) -> None:
        payload = None
        if self._pool is not None:
            # On the loop, so that whoever asks for a bucket after this call finds the version.
            payload = self._pool.take(version, slot if is_held else None)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._gathering, self._gather, slot, version, payload)

    def _gather(self, slot: int, version: int, payload: Payload | None) -> None:
        try:
            self._gatherer.gather(slot, self._read_snapshot(slot, version), payload)
        except BaseException as error:
            if payload is not None:
                payload.fail(f"{type(error).__name__}: {error}")
            raise

    async def drop(self, version: int) -> None:
        if self._pool is None:
            return
        self._pool.drop(version)
        # A broadcast that its lane has given up ends at the group's timeout at the latest.
        while self._pool.holds(version):
            await asyncio.sleep(_POLL_SECONDS)

    async def prepare(self, version: int, index: int, base: int | None) -> BucketSpec:
        with self._held().reading(version) as payload:
            await payload.wait_filled(index, self._settings.timeout_seconds)
            if base is None:
                return payload.bucket(index).spec
            encode = functools.partial(self._encode, version, index, base)
            return await asyncio.get_running_loop().run_in_executor(self._working, encode)

    def _encode(self, version: int, index: int, base: int) -> BucketSpec:
        with ExitStack() as stack:
            new, old = (stack.enter_context(self._held().reading(v)) for v in (version, base))
            delta = new.deltas.get((base, index))
            if delta is None:
                delta = new.deltas[base, index] = encode_delta(new, old, index)
        return delta.spec

    async def open(self, server_url: str, world_size: int) -> WeightGroupInfo:
        await self.leave(server_url)
        end = self._ends[server_url] = GroupEnd(server_url, world_size, self._settings)
        return end.info

    async def join(self, server_url: str) -> None:
        await self._end(server_url).join()

    async def send(self, server_url: str, version: int, index: int, base: int | None) -> None:
        pool = self._held()

        def read(broadcast: Callable[[torch.Tensor], None]) -> None:
            with pool.reading(version) as payload:
                bucket = payload.bucket(index) if base is None else payload.deltas[base, index]
                broadcast(bucket.payload)

        await self._end(server_url).send(read)

    async def leave(self, server_url: str) -> None:
        end = self._ends.pop(server_url, None)
        if end is not None:
            await end.leave()

    async def write(self, version: int, directory: str) -> None:
        pool, last = self._held(), self.num_buckets - 1
        with pool.reading(version) as payload:
            await payload.wait_filled(last, self._settings.timeout_seconds)
            write = functools.partial(self._write, version, Path(directory))
            await asyncio.get_running_loop().run_in_executor(self._working, write)

    def _write(self, version: int, directory: Path) -> None:
        # Held by the thread itself: a caller that gives up does not stop it.
        with self._held().reading(version) as payload:
            buckets = [payload.bucket(index) for index in range(self.num_buckets)]
            write_part(directory, self.rank, buckets)

    async def close(self) -> None:
        """Leaves all groups and ends the threads; one that hangs is left to the process."""
        await asyncio.gather(*(self.leave(url) for url in list(self._ends)))
        for executor in (self._gathering, self._working):
            executor.shutdown(wait=False, cancel_futures=True)

    def _held(self) -> PayloadPool:
        assert self._pool is not None, f"rank {self.rank} is no source"
        return self._pool

    def _end(self, server_url: str) -> GroupEnd:
        if server_url not in self._ends:
            raise RuntimeError(f"Rank {self.rank} has no group with {server_url}: open one first.")
        return self._ends[server_url]


def encode_delta(new: Payload, old: Payload, index: int) -> Bucket:
    """A bucket as changes to the same bucket of an older version."""
    current, previous = new.bucket(index), old.bucket(index)
    spec = current.spec
    itemsize = getattr(torch, spec.dtypes[0]).itemsize
    numels = [torch.Size(shape).numel() for shape in spec.shapes]
    payload, num_changed = sparse.encode(previous.payload, current.payload, numels, itemsize)
    return Bucket(replace(spec, num_changed=num_changed, base_version=old.version), payload)
