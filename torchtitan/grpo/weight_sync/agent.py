# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Does each rank's work for the leader: copies, gathers and drops versions.

Each rank has one agent. The leader, which is rank 0, calls its own agent directly and the
agents of other ranks over a channel (see `system/rank_channel.py`), through the same interface.
A sender carries gathered versions to the servers (see `transports/`).

All methods run in the event loop of the publisher's thread. Gathering blocks, so it runs
on a thread of its own.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torchtitan.grpo.system.rank_channel import operation
from torchtitan.grpo.weight_sync.gather import Gatherer
from torchtitan.grpo.weight_sync.payloads import Payload, PayloadPool
from torchtitan.grpo.weight_sync.slot_layout import Shards

_POLL_SECONDS = 0.02

ReadSnapshot = Callable[[int, int], Shards]
"""Function that takes a slot and a version and returns this rank's shards.

The function waits until the slot holds the version.
"""


class Agent:
    """Does one rank's part of copying, gathering and dropping versions.

    Args:
        rank: Rank of the current process in the default process group.
        gatherer: Does this rank's part of gathering shards on source ranks.
        read_snapshot: Returns this rank's shards.
        pool: Buffers of the versions that this rank sends; ``None`` if it is not a source.

    Attributes:
        rank: Rank of the current process in the default process group.
    """

    def __init__(
        self,
        rank: int,
        gatherer: Gatherer,
        read_snapshot: ReadSnapshot,
        pool: PayloadPool | None,
    ) -> None:
        self.rank = rank
        self._gatherer, self._read_snapshot, self._pool = gatherer, read_snapshot, pool
        self._gathering = ThreadPoolExecutor(1, thread_name_prefix="weight-gather")

    @operation
    async def wait_copied(self, slot: int, version: int) -> None:
        """Waits until this rank's shards of a version lie in a slot."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._gathering, self._read_snapshot, slot, version)

    @operation
    async def gather(self, slot: int, version: int, is_held: bool) -> None:
        """Takes part in gathering a version. Source ranks keep the version until :meth:`drop`.

        Args:
            slot: Slot in which all ranks have their shards of the version.
            version: Policy version.
            is_held: Whether the slot is not written until the version is dropped, so that the
                version can be sent from the slot. Otherwise, the slot may be written again once
                all ranks have returned from this method.
        """
        payload = None
        if self._pool is not None:
            # The buffers are taken on the event loop, so that a sender that asks for a bucket of
            # the version after this call finds the version in the pool.
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

    @operation
    async def drop(self, version: int) -> None:
        """Drops a version, and returns when it is no longer read and its buffers are free."""
        if self._pool is None:
            return
        self._pool.drop(version)
        # A broadcast that was cancelled by its lane ends no later than the group's timeout.
        while self._pool.holds(version):
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """Ends the gathering threads. A thread that hangs ends with the process."""
        self._gatherer.close()
        self._gathering.shutdown(wait=False, cancel_futures=True)
