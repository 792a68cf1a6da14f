# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The receiving end of an update: buckets are staged while the old weights are served.

    consumes        broadcasts of the trainer's ranks, on a thread "weight-staging" for each group
    produces        all tensors of the update, whole and verified, or the reason of a failure
    waits for       each broadcast, up to the timeout of its group
    unblocked by    the broadcast, the group's timeout, the end of the trainer, or `drop`

Requests that announce buckets may overtake each other, and the bytes of one bucket could be taken
for those of another one with the same size. So each bucket has a number within its group, and is
received after all lower ones were announced. Buckets of different groups are received at the same
time; over NCCL all workers of a server launch their broadcasts in one order (:class:`LaunchOrder`).

vLLM's workers and the embedded server use this module, so it needs only torch and numpy.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

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
from torchtitan.grpo.weight_wire.receiving import WeightGroup, leave_groups
from torchtitan.grpo.weight_wire.sparse import apply, decode
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

_LEAVE_SECONDS = 5.0


class LaunchOrder:
    """Lets threads launch collectives in the order in which they were announced.

    The kernel of an NCCL broadcast occupies its GPU until all members of the group have launched
    theirs. If two workers launched the broadcasts of two groups in opposite orders, and a GPU could
    run only one of them, neither would ever end. The order of the announcements is the same for all
    workers. A launch does not wait for the end of the broadcasts before it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_tickets = 0
        self._first_waiting = 0
        self._passed: set[int] = set()
        self._is_closed = False

    def ticket(self) -> int:
        """Returns the next ticket, whose holder must launch, or call :meth:`give_up`."""
        with self._changed:
            self._num_tickets += 1
            return self._num_tickets - 1

    @contextmanager
    def turn(self, ticket: int, timeout_seconds: float) -> Iterator[None]:
        """Waits until all lower tickets had a turn. Raises RuntimeError at the timeout or :meth:`close`."""
        with self._changed:
            has_come = self._changed.wait_for(
                lambda: self._is_closed or self._first_waiting >= ticket, timeout_seconds
            )
            if self._is_closed:
                raise RuntimeError("The update was dropped before the broadcast.")
            if not has_come:
                raise RuntimeError(
                    f"Broadcasts that were announced earlier did not begin within "
                    f"{timeout_seconds:g} s."
                )
        try:
            yield
        finally:
            self.give_up(ticket)

    def give_up(self, ticket: int) -> None:
        """Lets higher tickets launch without waiting for this one. It is idempotent."""
        with self._changed:
            if ticket >= self._first_waiting:
                self._passed.add(ticket)
            while self._first_waiting in self._passed:
                self._passed.remove(self._first_waiting)
                self._first_waiting += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class UpdateError(RuntimeError):
    """An update was refused or failed. The weights that are served have not changed."""


@dataclass(frozen=True)
class StagingPlace:
    """Lets staging read the served weights, and convert the received ones.

    ``base`` returns a copy of a served tensor, by its name and the dtype in which it was sent; a
    delta is applied to the copy. ``place`` converts a whole, verified tensor, for example by a cast
    or a move to ``device``. It may return the tensor itself, and may return before its work on
    ``stream`` has ended. Staging threads run on that stream (``None``: the current one). Versions are
    staged ``on_host`` if the device has no room; over NCCL the device then holds one piece at a time.
    """

    device: torch.device
    base: Callable[[str, torch.dtype], torch.Tensor]
    place: Callable[[str, torch.Tensor], torch.Tensor]
    on_host: bool = False
    stream: torch.cuda.Stream | None = None

    def buffer_device(self, group: WeightGroup) -> torch.device:
        return self.device if group.is_nccl and not self.on_host else torch.device("cpu")

    def on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


@dataclass
class _Announced:
    """An announced bucket, or tensors to read from a disk, without a ``group``. Only NCCL has a ``ticket``."""

    work: Callable[["_Announced"], None]
    group: WeightGroup | None
    ticket: int | None = None
    future: "Future[None]" = field(default_factory=Future)

    @property
    def source(self) -> str:
        """Key of the thread that does the work: the name of the group, or an empty string for the disk."""
        return self.group.name if self.group is not None else ""


class _Thread:
    """A thread that does the announced work of one source, in order."""

    def __init__(self, run: Callable[["_Thread"], None]) -> None:
        self.queue: queue.SimpleQueue[_Announced | None] = queue.SimpleQueue()
        self.current: WeightGroup | None = None
        self.thread = threading.Thread(target=run, args=(self,), name="weight-staging")
        self.thread.daemon = True  # a driver may hang; the process must end
        self.thread.start()


class Staging:
    """Holds the buckets of one update until it is committed; for any thread.

    The caller settles ``buffers`` after the commit. ``dtypes`` holds the dtype of each announced
    tensor by name, even of tensors without changes.
    """

    def __init__(self, place: StagingPlace, buffers: BufferPool) -> None:
        self._place = place
        self._buffers = buffers
        self._tensors: dict[str, torch.Tensor] = {}
        self.dtypes: dict[str, str] = {}
        self._num_open = 0
        self._failure: str | None = None
        self._broken = False
        self._lock = threading.Lock()
        self._next: dict[str, int] = {}
        self._early: dict[tuple[str, int], _Announced] = {}
        self._threads: dict[str, _Thread] = {}
        self._order = LaunchOrder()

    @property
    def is_receiving(self) -> bool:
        """Whether an announced bucket has neither arrived nor failed yet."""
        return self._num_open > 0

    def refuse(self, reason: str) -> None:
        """Makes the update fail because of a bucket; no further bucket is received.

        The bytes of the refused bucket may have been sent already, and would be taken for those of the
        next bucket. (gloo ends a process that receives more bytes than it expects.)
        """
        self._broken = True
        self._fail(reason)
        self._put_early()

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason  # the first one counts

    def announce(
        self, bucket: BucketSpec, group: WeightGroup, *, sequence: int | None
    ) -> "Future[None]":
        """Queues a bucket to be received; the future completes when its tensors are whole and verified.

        Names, dtypes and shapes must fit the model. ``sequence`` is the number of the bucket in the
        update and this group, from 0. Raises ValueError if it is ``None``, or if a tensor or a
        number was announced before.
        """
        item = _Announced(lambda item: self._receive(bucket, item), group)
        with self._lock:
            again = self.dtypes.keys() & set(bucket.names)
            if again:
                raise ValueError(f"{min(again)} was announced twice in one update.")
            in_order = self._in_order(item, group.name, sequence)
            self.dtypes.update(zip(bucket.names, bucket.dtypes, strict=True))
            self._num_open += 1
            for ready in in_order:
                self._put(ready)
        return item.future

    def read(
        self, dtypes: Mapping[str, str], load: Callable[[], Mapping[str, torch.Tensor]]
    ) -> "Future[None]":
        """Queues the reading of tensors that fit the model, of these ``dtypes``, from a disk.

        ``load`` runs on the staging thread; if it raises ValueError or OSError, the update fails.
        """

        def work(_: _Announced) -> None:
            for name, tensor in load().items():
                self._tensors[name] = self._place.place(name, tensor)

        item = _Announced(work, None)
        with self._lock:
            self.dtypes.update(dtypes)
            self._num_open += 1
            self._put(item)
        return item.future

    def _put(self, item: _Announced) -> None:
        if item.group is not None and item.group.is_nccl:
            item.ticket = self._order.ticket()
        if item.source not in self._threads:
            self._threads[item.source] = _Thread(self._run)
        self._threads[item.source].queue.put(item)

    def collect(self, timeout_seconds: float) -> dict[str, torch.Tensor]:
        """Returns the new tensors, by name. Raises UpdateError if one failed or does not arrive in time."""
        with self._lock:
            if self._early:
                self._fail(f"Buckets before {sorted(self._early)[0]} were not announced.")
        if not self._end_threads(timeout_seconds):
            self._fail(f"Not all announced buckets arrived within {timeout_seconds} s.")
        if self._failure is not None:
            raise UpdateError(self._failure)
        return self._tensors

    def drop(self) -> None:
        """Ends the threads and drops all tensors. The groups of awaited broadcasts are left."""
        self._broken = True
        self._fail("The update was dropped.")
        self._order.close()
        with self._lock:
            early, self._early = list(self._early.values()), {}
            waiting = [thread.current for thread in self._threads.values()]
        leave_groups(group for group in waiting if group is not None)
        for item in early:
            self._settle(item, UpdateError("The update was dropped."))
        self._end_threads(_LEAVE_SECONDS)
        self._tensors = {}
        self._buffers.forget()

    def _end_threads(self, timeout_seconds: float) -> bool:
        """Lets the threads finish what was announced; returns whether all did so in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            threads = list(self._threads.values())
        for each in threads:
            each.queue.put(None)
        for each in threads:
            each.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(each.thread.is_alive() for each in threads)

    def _in_order(self, item: _Announced, group: str, sequence: int | None) -> list[_Announced]:
        """Returns the buckets that can be received after this announcement, in order."""
        if self._broken:
            return [item]  # its future only receives the reason of the failure
        if sequence is None:
            raise ValueError("sequence must be the number of the bucket in its group, got null.")
        if sequence < self._next.get(group, 0) or (group, sequence) in self._early:
            raise ValueError(f"Bucket {sequence} of group {group!r} was announced twice.")
        self._early[group, sequence] = item
        ready = []
        while following := self._early.pop((group, self._next.get(group, 0)), None):
            self._next[group] = self._next.get(group, 0) + 1
            ready.append(following)
        return ready

    def _run(self, thread: _Thread) -> None:
        if self._place.device.type == "cuda":
            torch.cuda.set_device(self._place.device)  # each thread has its own current device
        with self._place.on_stream():
            self._work_off(thread)

    def _work_off(self, thread: _Thread) -> None:
        while (item := thread.queue.get()) is not None:
            error = None
            try:
                thread.current = item.group
                if self._broken:
                    raise UpdateError(self._failure or "The update was dropped.")
                item.work(item)
            except (RuntimeError, ValueError, OSError) as caught:
                # Recorded for the commit too: without this bucket it would serve a mixture.
                self._fail(str(caught))
                error = UpdateError(str(caught))
                if self._broken:
                    self._put_early()
            thread.current = None
            if item.ticket is not None:
                self._order.give_up(item.ticket)
            self._settle(item, error)

    def _put_early(self) -> None:
        """Queues the buckets that waited for an earlier bucket, which will not be received any more."""
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
    def _receive(self, bucket: BucketSpec, item: _Announced) -> None:
        group, turn = item.group, nullcontext()
        assert group is not None
        if item.ticket is not None:
            # An earlier bucket may wait for one that is being received.
            turn = self._order.turn(item.ticket, 2 * group.timeout_seconds)
        try:
            buffer = self._buffers.take(bucket_bytes(bucket), self._place.buffer_device(group))
            group.receive(buffer, self._place.device, turn)
        except RuntimeError:
            self._broken = True
            raise
        if self._failure is not None:
            # Received although the update has failed: a trainer that does not know of the failure
            # yet would otherwise wait in its broadcast until the timeout of the group.
            raise UpdateError(self._failure)
        is_delta = bucket.num_changed is not None
        tensors = self._with_changes(buffer, bucket) if is_delta else split_bucket(buffer, bucket)
        if not self._keep(bucket, tensors) & {storage_of(buffer)}:
            if self._place.stream is not None:
                self._place.stream.synchronize()  # a copy to the GPU may still read the buffer
            self._buffers.give_back(buffer)

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
