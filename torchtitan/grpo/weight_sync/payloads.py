# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gathered versions, and who still reads them.

A lane may take long over a version while newer ones are gathered. So every version has
buffers of its own, which return to the pool when its last reader is done: at most one set
for each lane, one for the newest version and one that is being filled.

Belongs to the leader's event loop; no locks.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchtitan.grpo.weight_sync.connection import Bucket


class Gathered:
    """One version of all weights, immutable.

    Attributes:
        version: Policy version.
        buckets: All of the model.
    """

    def __init__(self, version: int, buckets: list[Bucket]) -> None:
        self.version, self.buckets = version, buckets
        self.num_readers = 0
        self.is_reusable = True


class Payloads:
    """The newest version, and the buffers of those that are still read."""

    def __init__(self) -> None:
        self.newest: Gathered | None = None
        self._free: list[list[torch.Tensor]] = []
        self._arrived = asyncio.Condition()

    def free_buffers(self) -> list[torch.Tensor] | None:
        """Buffers that nobody reads; None where new ones must be made."""
        return self._free.pop() if self._free else None

    async def put(self, gathered: Gathered) -> None:
        """Makes a version the newest."""
        async with self._arrived:
            former, self.newest = self.newest, gathered
            if former is not None:
                self._maybe_free(former)
            self._arrived.notify_all()

    async def newer_than(self, version: int, timeout_seconds: float) -> Gathered | None:
        """Waits for something newer than ``version``; None after the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds), self._arrived:
                await self._arrived.wait_for(
                    lambda: self.newest is not None and self.newest.version > version
                )
        except TimeoutError:
            return None
        return self.newest

    @contextmanager
    def reading(self, gathered: Gathered) -> Iterator[None]:
        """Keeps a version's buffers while they are sent."""
        gathered.num_readers += 1
        try:
            yield
        except BaseException:
            # A broadcast that was given up may still read them.
            gathered.is_reusable = False
            raise
        finally:
            gathered.num_readers -= 1
            self._maybe_free(gathered)

    def _maybe_free(self, gathered: Gathered) -> None:
        if gathered is self.newest or gathered.num_readers or not gathered.is_reusable:
            return
        gathered.is_reusable = False
        self._free.append([bucket.payload for bucket in gathered.buckets])
