# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Manages the buffers, in host memory, of the versions that a source rank sends.

    (free buffers) --take--> filled bucket by bucket --> read by senders
          ^                                                  |
          +--- dropped by the leader, no reader is left <----+

A bucket is sent as soon as it is filled, while later ones are still being gathered. A slow server
may still receive a version while newer ones are gathered, so every version has its own buffers:
those of a snapshot slot that is held for it, or copies. Buffers are reused only when the leader
has dropped the version and the last thread that reads them has returned. Such a thread may go on
long after its lane has abandoned the push.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from torchtitan.grpo.weight_wire.buckets import tensor_bytes
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec


@dataclass(frozen=True)
class Bucket:
    """The bytes of several tensors, [num_bytes] uint8, as they are sent to a server."""

    spec: BucketSpec
    payload: torch.Tensor


class PayloadFailed(RuntimeError):
    """A version was not gathered completely, or is no longer held."""


class Payload:
    """The buckets that a source sends for one version. They do not change after they are filled.

    It is made on the event loop of the publisher's thread and filled by the gathering thread.
    ``deltas`` holds encoded buckets by base version and index of the bucket. Only the pool uses
    ``is_lent``, ``num_readers`` and ``is_dropped``, under its lock.
    """

    def __init__(
        self, version: int, specs: Sequence[BucketSpec], buffers: list[torch.Tensor], checksum: bool
    ) -> None:
        self.version, self.buffers = version, buffers
        self.deltas: dict[tuple[int, int], Bucket] = {}
        self.is_lent = False  # the buffers belong to a snapshot slot, which the leader releases
        self.num_readers = 0  # open PayloadPool.reading contexts
        self.is_dropped = False
        self._specs, self._checksum = list(specs), checksum
        self._sums: dict[int, tuple[int, ...]] = {}
        self._num_filled = 0
        self._failure: str | None = None
        self._loop = asyncio.get_running_loop()
        self._progress = asyncio.Event()

    def filled(self, index: int) -> None:
        """Marks a bucket as filled. Called by the gathering thread, in the order of buckets."""
        if self._checksum:
            self._specs[index] = replace(self._specs[index], checksums=self._sum_up(index))
        assert index == self._num_filled, (index, self._num_filled)
        self._num_filled += 1
        self._loop.call_soon_threadsafe(self._announce)

    def fail(self, reason: str) -> None:
        self._failure = reason
        self._loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        former, self._progress = self._progress, asyncio.Event()
        former.set()

    async def wait_filled(self, index: int, timeout_seconds: float) -> None:
        """Waits until a bucket is filled. Raises PayloadFailed if gathering failed or takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while self._num_filled <= index and self._failure is None:
                    await self._progress.wait()
        if self._num_filled <= index:
            reason = self._failure or f"it was not gathered within {timeout_seconds:g} s"
            raise PayloadFailed(
                f"Bucket {index} of version {self.version} could not be gathered: {reason}. Check "
                "the logs of the other training ranks, or raise weight_sync.timeout_seconds."
            )

    def checksums(self) -> dict[str, int]:
        """Returns all tensors' checksums by name, once all buckets are filled. For any thread."""
        assert self._num_filled == len(self._specs), (self._num_filled, self.version)
        checksums: dict[str, int] = {}
        for index, spec in enumerate(self._specs):
            checksums |= zip(spec.names, self._sum_up(index), strict=True)
        return checksums

    def _sum_up(self, index: int) -> tuple[int, ...]:
        if index not in self._sums:
            spec = self._specs[index]
            parts = self.buffers[index].split(tensor_bytes(spec.dtypes, spec.shapes))
            self._sums[index] = tuple(map(tensor_checksum, parts))
        return self._sums[index]

    def bucket(self, index: int) -> Bucket:
        assert index < self._num_filled, (index, self._num_filled)
        return Bucket(self._specs[index], self.buffers[index])


class PayloadPool:
    """The buffers of a source rank's versions. Any thread may call all methods but :meth:`take`."""

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        sizes: Sequence[int],
        checksum: bool,
        buckets_in_slot: Callable[[int], list[torch.Tensor] | None] = lambda slot: None,
    ) -> None:
        self._specs, self._sizes = specs, sizes
        self._checksum = checksum
        self._buckets_in_slot = buckets_in_slot
        self._free: list[list[torch.Tensor]] = []
        self._held: dict[int, Payload] = {}
        self._lock = threading.Lock()

    def take(self, version: int, held_slot: int | None = None) -> Payload:
        """Returns a payload for a new version. Called on the event loop of the publisher's thread.

        If there is a ``held_slot``, which is held as long as the version, buckets are sent from that slot.
        """
        in_slot = self._buckets_in_slot(held_slot) if held_slot is not None else None
        payload = Payload(version, self._specs, in_slot or self._own_buffers(), self._checksum)
        payload.is_lent = in_slot is not None
        with self._lock:
            self._held[version] = payload
        return payload

    def _own_buffers(self) -> list[torch.Tensor]:
        with self._lock:
            if self._free:
                return self._free.pop()
        # The buffers are not pinned, although a GPU may read them, because pinning waits for all
        # work of the GPU.
        return [torch.empty(size, dtype=torch.uint8) for size in self._sizes]

    @contextmanager
    def reading(self, version: int) -> Iterator[Payload]:
        """Keeps a version's buffers alive while a thread reads them. Raises PayloadFailed after a drop."""
        with self._lock:
            held = self._held.get(version)
            if held is None or held.is_dropped:
                raise PayloadFailed(f"Version {version} is no longer held by this source rank.")
            held.num_readers += 1
        try:
            yield held
        finally:
            with self._lock:
                held.num_readers -= 1
                self._maybe_free(held)

    def drop(self, version: int) -> None:
        """Admits no further reader of a version and frees its buffers after the last reader."""
        with self._lock:
            held = self._held.get(version)
            if held is not None:
                held.is_dropped = True
                self._maybe_free(held)

    def holds(self, version: int) -> bool:
        return version in self._held

    def _maybe_free(self, held: Payload) -> None:
        if held.is_dropped and not held.num_readers:
            del self._held[held.version]
            if not held.is_lent:
                self._free.append(held.buffers)
