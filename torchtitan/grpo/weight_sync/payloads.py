# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a source rank sends: versions of its share of the weights, and their buffers.

    (free buffers) --take--> filled bucket by bucket --> read by lanes
          ^                                                  |
          +-- dropped by the leader, and read by nobody <----+

Lanes send a bucket as soon as it is filled, while later ones are still being gathered. A
slow lane may take long over a version while newer ones are gathered, so every version has
buffers of its own: a snapshot slot that is held for it, or copies. They are used again only
when the leader has dropped the version and the last thread that reads them has come back,
however long ago its lane gave it up.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from torchtitan.grpo.weight_wire.buckets import tensor_bytes
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec


@dataclass(frozen=True)
class Bucket:
    """Some tensors, as they travel.

    Attributes:
        spec: What they are.
        payload: [num_bytes] uint8, contiguous.
    """

    spec: BucketSpec
    payload: torch.Tensor


class PayloadFailed(RuntimeError):
    """A version was not gathered whole, or is no longer there."""


class Payload:
    """One version of a source's share; immutable once it is filled.

    Made on the event loop of the publisher's thread, filled by the gathering thread.

    Attributes:
        version: Policy version.
        buffers: A uint8 tensor for each bucket.
        deltas: Buckets as changes to another version, by that version and their index.
    """

    def __init__(
        self, version: int, specs: Sequence[BucketSpec], buffers: list[torch.Tensor], checksum: bool
    ) -> None:
        self.version, self.buffers = version, buffers
        self.deltas: dict[tuple[int, int], Bucket] = {}
        self._specs, self._checksum = list(specs), checksum
        self._num_filled = 0
        self._failure: str | None = None
        self._loop = asyncio.get_running_loop()
        self._progress = asyncio.Event()

    def filled(self, index: int) -> None:
        """The gathering thread has written the bucket; they come in order."""
        if self._checksum:
            self._specs[index] = with_checksums(self._specs[index], self.buffers[index])
        assert index == self._num_filled, (index, self._num_filled)
        self._num_filled += 1
        self._loop.call_soon_threadsafe(self._announce)

    def fail(self, reason: str) -> None:
        """What is not yet filled never will be."""
        self._failure = reason
        self._loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        former, self._progress = self._progress, asyncio.Event()
        former.set()

    async def wait_filled(self, index: int, timeout_seconds: float) -> None:
        """Waits for a bucket.

        Raises:
            PayloadFailed: It was not filled, or not in time.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while self._num_filled <= index and self._failure is None:
                    await self._progress.wait()
        if self._num_filled <= index:
            raise PayloadFailed(
                f"Bucket {index} of version {self.version} must be gathered within "
                f"{timeout_seconds:g} s: {self._failure or 'it was not'}."
            )

    def bucket(self, index: int) -> Bucket:
        """A filled bucket; any thread."""
        assert index < self._num_filled, (index, self._num_filled)
        return Bucket(self._specs[index], self.buffers[index])


def with_checksums(spec: BucketSpec, payload: torch.Tensor) -> BucketSpec:
    """The spec with a checksum of each tensor of a bucket that holds them whole."""
    parts = payload.split(tensor_bytes(spec.dtypes, spec.shapes))
    return replace(spec, checksums=tuple(tensor_checksum(part) for part in parts))


class PayloadPool:
    """All versions that a source rank holds; all methods but :meth:`take` for any thread.

    Args:
        specs: Of the source's buckets.
        sizes: Their bytes.
        device: Where they lie: the device that weight groups send from.
        checksum: Add checksums to the buckets' specs.
        in_slots: For each snapshot slot the buckets that lie in it; None where none do.
    """

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        sizes: Sequence[int],
        device: torch.device,
        checksum: bool,
        in_slots: Sequence[list[torch.Tensor]] | None = None,
    ) -> None:
        self._specs, self._sizes = specs, sizes
        self._device, self._checksum = device, checksum
        self._in_slots = in_slots
        self._free: list[list[torch.Tensor]] = []
        self._payloads: dict[int, Payload] = {}
        self._readers: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._lent: set[int] = set()  # versions whose buffers are a slot's
        self._lock = threading.Lock()

    def take(self, version: int, held_slot: int | None = None) -> Payload:
        """Buffers for a new version: those in its slot, else used ones, else new ones.

        On the event loop of the publisher's thread.

        Args:
            version: Policy version.
            held_slot: Its slot, where that is held for as long as the version is: the buckets
                are sent from there, if they lie there.
        """
        held = None
        if held_slot is not None and self._in_slots is not None:
            held = self._in_slots[held_slot]
        buffers = held if held is not None else self._own_buffers()
        payload = Payload(version, self._specs, buffers, self._checksum)
        with self._lock:
            self._payloads[version], self._readers[version] = payload, 0
            if held is not None:
                self._lent.add(version)
        return payload

    def _own_buffers(self) -> list[torch.Tensor]:
        with self._lock:
            if self._free:
                return self._free.pop()
        pinned = self._device.type == "cpu" and torch.cuda.is_available()
        return [
            torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=pinned)
            for size in self._sizes
        ]

    @contextmanager
    def reading(self, version: int) -> Iterator[Payload]:
        """Keeps a version's buffers while a thread reads them.

        Raises:
            PayloadFailed: The version has been dropped.
        """
        with self._lock:
            if version not in self._payloads or version in self._dropped:
                raise PayloadFailed(f"Version {version} is no longer held.")
            self._readers[version] += 1
        try:
            yield self._payloads[version]
        finally:
            with self._lock:
                self._readers[version] -= 1
                self._maybe_free(version)

    def drop(self, version: int) -> None:
        """Nobody is to begin reading the version any more."""
        with self._lock:
            if version in self._payloads:
                self._dropped.add(version)
                self._maybe_free(version)

    def holds(self, version: int) -> bool:
        """Whether the version still has buffers, for whatever reason."""
        return version in self._payloads

    def _maybe_free(self, version: int) -> None:
        if version in self._dropped and not self._readers[version]:
            payload = self._payloads.pop(version)
            if version not in self._lent:  # else the leader lets the slot go
                self._free.append(payload.buffers)
            self._lent.discard(version)
            self._dropped.discard(version)
            del self._readers[version]
