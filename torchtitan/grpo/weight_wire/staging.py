# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The receiving end of an update: buckets are staged while the old weights are served.

    consumes        broadcasts of the trainer's ranks, on the thread "weight-staging"
    produces        all tensors of the update, whole and verified, or the reason of a failure
    waits for       each broadcast, up to the timeout of its group
    unblocked by    the broadcast, the group's timeout, the end of the trainer, or `drop`

Requests that announce buckets may overtake each other. Each bucket therefore has a number within
its group, and it is received after all lower numbers were announced. Otherwise the bytes of one
bucket could be taken for those of another one with the same size. The order in which the buckets
of several groups are received depends on the order of the announcements alone, so it is the same
in all workers of a server.

vLLM's workers and the embedded server use this module, so it needs torch and numpy alone.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from torchtitan.grpo.weight_wire.buckets import (
    WIRE_DTYPES,
    aligned,
    bucket_bytes,
    element_counts,
    split_bucket,
)
from torchtitan.grpo.weight_wire.buffers import BufferPool, storage_of
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.receiving import WeightGroup
from torchtitan.grpo.weight_wire.sparse import apply, decode
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

_LEAVE_SECONDS = 5.0


class StagingError(RuntimeError):
    """The update cannot be committed. The weights that are served have not changed."""


@dataclass(frozen=True)
class StagingPlace:
    """Lets staging read the served weights, and convert the received ones.

    Attributes:
        device: Device of the model. NCCL groups receive there, gloo groups on the CPU.
        base: Returns a copy of a served tensor, by its name and the dtype in which it was sent.
            A delta is applied to the copy, on the copy's device.
        place: Converts a whole, verified tensor, for example by a cast or a move to another
            device. It may return the tensor itself.
    """

    device: torch.device
    base: Callable[[str, torch.dtype], torch.Tensor]
    place: Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Announced:
    work: Callable[[], None]
    group: WeightGroup | None
    future: "Future[None]" = field(default_factory=Future)


class Staging:
    """Holds the buckets of one update until the update is committed.

    Methods may be called from any thread.

    Args:
        place: See :class:`StagingPlace`.
        buffers: Pool of the receive buffers. The caller settles it after the commit.
    """

    def __init__(self, place: StagingPlace, buffers: BufferPool) -> None:
        self._place = place
        self._buffers = buffers
        self._tensors: dict[str, torch.Tensor] = {}
        self._dtypes: dict[str, str] = {}
        self._num_open = 0
        self._failure: str | None = None
        self._broken = False
        self._lock = threading.Lock()
        self._next: dict[str, int] = {}
        self._early: dict[tuple[str, int], _Announced] = {}
        self._queue: queue.SimpleQueue[_Announced | None] = queue.SimpleQueue()
        self._current: WeightGroup | None = None
        self._thread: threading.Thread | None = None

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of each announced tensor, by name. Tensors without changes are included."""
        return dict(self._dtypes)

    @property
    def is_receiving(self) -> bool:
        """Whether an announced bucket has neither arrived nor failed yet."""
        return self._num_open > 0

    @property
    def failure(self) -> str | None:
        """Why the update cannot be committed, or ``None``."""
        return self._failure

    def refuse(self, reason: str) -> None:
        """Makes the update fail because of a bucket; no further bucket is received.

        The bytes of the refused bucket may have been sent already and would be received as those
        of the next one. (gloo ends a process that receives more bytes than it expects.)
        """
        self._broken = True
        self._fail(reason)
        self._put_early()

    def _fail(self, reason: str) -> None:
        """Records why the update failed. The first reason is kept."""
        self._failure = self._failure or reason

    def announce(
        self,
        bucket: BucketSpec,
        group: WeightGroup,
        *,
        sequence: int | None = None,
        flattened: bool = True,
    ) -> "Future[None]":
        """Queues a bucket to be received.

        The future that is returned ends when the tensors of the bucket are whole and verified.

        Args:
            bucket: Description of the bucket. The caller has checked that names, dtypes and
                shapes fit the model.
            group: Group over which the bucket is broadcast.
            sequence: Number of the bucket among those of the update over this group, from 0.
                ``None`` if the caller announces each bucket after the one before has arrived.
            flattened: Whether all bytes are one broadcast, or each tensor is one.

        Raises:
            ValueError: If a tensor was announced before, or a sequence number twice.
        """
        item = _Announced(lambda: self._receive(bucket, group, flattened), group)
        with self._lock:
            again = self._dtypes.keys() & set(bucket.names)
            if again:
                raise ValueError(f"{min(again)} was announced twice in one update.")
            in_order = self._in_order(item, group.name, sequence)
            self._dtypes.update(zip(bucket.names, bucket.dtypes, strict=True))
            self._num_open += 1
            for ready in in_order:
                self._put(ready)
        return item.future

    def read(
        self, dtypes: Mapping[str, str], load: Callable[[], Mapping[str, torch.Tensor]]
    ) -> "Future[None]":
        """Queues the reading of verified tensors from another source, such as a disk.

        Args:
            dtypes: Dtype of each tensor, by name. The tensors must fit the model.
            load: Reads the tensors on the staging thread. If it raises ValueError or OSError,
                the update fails.
        """

        def work() -> None:
            for name, tensor in load().items():
                self._tensors[name] = self._place.place(name, tensor)

        item = _Announced(work, None)
        with self._lock:
            self._dtypes.update(dtypes)
            self._num_open += 1
            self._put(item)
        return item.future

    def _put(self, item: _Announced) -> None:
        self._queue.put(item)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weight-staging")
            self._thread.daemon = True  # a driver may hang; the process must end
            self._thread.start()

    def collect(self, timeout_seconds: float) -> dict[str, torch.Tensor]:
        """Waits for all announced buckets and returns the new tensors, by name.

        Raises:
            StagingError: If a bucket failed, or did not arrive within ``timeout_seconds``.
        """
        with self._lock:
            if self._early:
                self._fail(f"Buckets before {sorted(self._early)[0]} were not announced.")
        self._end_thread(timeout_seconds)
        if self._thread is not None and self._thread.is_alive():
            self._fail(f"Not all announced buckets arrived within {timeout_seconds} s.")
        if self._failure is not None:
            raise StagingError(self._failure)
        return self._tensors

    def drop(self) -> None:
        """Ends the thread and drops all tensors. The group of an awaited broadcast is left."""
        self._broken = True
        self._fail("The update was dropped.")
        current = self._current
        if current is not None:
            current.leave()
        with self._lock:
            early, self._early = list(self._early.values()), {}
        for item in early:
            self._settle(item, StagingError("The update was dropped."))
        self._end_thread(_LEAVE_SECONDS)
        self._tensors = {}
        self._buffers.forget()

    def _end_thread(self, timeout_seconds: float) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_seconds)

    def _in_order(self, item: _Announced, group: str, sequence: int | None) -> list[_Announced]:
        """Returns the buckets that can be received after this announcement, in order."""
        if sequence is None or self._broken:
            return [item]  # its future only receives the reason of the failure
        if sequence < self._next.get(group, 0) or (group, sequence) in self._early:
            raise ValueError(f"Bucket {sequence} of group {group!r} was announced twice.")
        self._early[group, sequence] = item
        ready = []
        while following := self._early.pop((group, self._next.get(group, 0)), None):
            self._next[group] = self._next.get(group, 0) + 1
            ready.append(following)
        return ready

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            error = None
            try:
                if self._broken:
                    raise StagingError(self._failure or "The update was dropped.")
                self._current = item.group
                item.work()
            except (RuntimeError, ValueError, OSError) as caught:
                # Recorded for the commit too: without this bucket it would serve a mixture.
                self._fail(str(caught))
                error = StagingError(str(caught))
                if self._broken:
                    self._put_early()
            self._current = None
            self._settle(item, error)

    def _put_early(self) -> None:
        """Queues buckets that waited for an earlier one, which will not be received."""
        with self._lock:
            for early in self._early.values():
                self._put(early)
            self._early = {}

    def _settle(self, item: _Announced, error: BaseException | None) -> None:
        with self._lock:
            self._num_open -= 1
        if item.future.set_running_or_notify_cancel():
            if error is None:
                item.future.set_result(None)
            else:
                item.future.set_exception(error)

    @torch.no_grad()
    def _receive(self, bucket: BucketSpec, group: WeightGroup, flattened: bool) -> None:
        device = group.buffer_device(self._place.device)
        if not flattened:
            tensors = [
                torch.empty(shape, dtype=WIRE_DTYPES[dtype], device=device)
                for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True)
            ]
            for tensor in tensors:
                self._receive_into(tensor, group)
            self._keep(bucket, tensors)
            return
        buffer = self._buffers.take(bucket_bytes(bucket), device)
        self._receive_into(buffer, group)
        is_delta = bucket.num_changed is not None
        tensors = self._with_changes(buffer, bucket) if is_delta else split_bucket(buffer, bucket)
        if not self._keep(bucket, tensors) & {storage_of(buffer)}:
            self._buffers.give_back(buffer)

    def _receive_into(self, tensor: torch.Tensor, group: WeightGroup) -> None:
        try:
            group.receive(tensor)
        except RuntimeError:
            self._broken = True
            raise
        if self._failure is not None:
            # Received although the update has failed: a trainer that does not know of the failure
            # yet would otherwise wait in its broadcast until the timeout of the group.
            raise StagingError(self._failure)

    def _keep(self, bucket: BucketSpec, tensors: list[torch.Tensor]) -> set[int]:
        """Verifies whole tensors and places them; returns the storages in which they lie."""
        storages = set()
        for i, (name, tensor) in enumerate(zip(bucket.names, tensors, strict=True)):
            if bucket.checksums is not None:
                found, expected = tensor_checksum(tensor), bucket.checksums[i]
                if found != expected:
                    raise ValueError(f"{name} must have checksum {expected}, got {found}.")
            if bucket.num_changed is None or bucket.num_changed[i] != 0:
                self._tensors[name] = self._place.place(name, tensor)
                storages.add(storage_of(self._tensors[name]))
        return storages

    def _with_changes(self, payload: torch.Tensor, bucket: BucketSpec) -> list[torch.Tensor]:
        assert bucket.num_changed is not None
        numels, itemsize = element_counts(bucket)
        tensors = []
        for name, dtype, shape, changes in zip(
            bucket.names,
            bucket.dtypes,
            bucket.shapes,
            decode(payload, numels, bucket.num_changed, itemsize),
            strict=True,
        ):
            if changes.indices is None:
                tensor = aligned(changes.values.view(WIRE_DTYPES[dtype]).view(shape))
            else:
                tensor = self._place.base(name, WIRE_DTYPES[dtype])
                apply(tensor, changes)
            tensors.append(tensor)
        return tensors
