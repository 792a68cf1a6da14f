# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Copies this rank's shards, cast to the wire dtype, at a step boundary.

The training thread only starts a copy:

- On CUDA, a copy engine writes pinned host memory on a side stream. :meth:`Snapshots.fence`
  orders the next optimizer step after the copy on the device, without a wait on the host.
- On CPU, the thread ``snapshot-copy`` makes one copy at a time, in the order in which they were
  started. Only the fence before the next optimizer step may wait.

Two copies therefore never write a slot at the same time, and a step without an optimizer step
needs no fence. `slots.py` ensures that no copy writes a slot that is still read.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

import torch

from torchtitan.grpo.models.shards import local_tensor
from torchtitan.grpo.system.device import new_stream
from torchtitan.grpo.system.process_tuning import yield_to_training
from torchtitan.grpo.weight_sync.slot_layout import Shards

_WAIT_SECONDS = 120.0
# A copy begins with this delay. When the end of the copy wakes up other threads, the training
# threads of all ranks have then passed the step boundary, where the woken threads would compete with
# them for the interpreter and, on few cores, for a core.
_HEAD_START_SECONDS = 0.003
# Interval at which a reader polls a CUDA event, because waiting for an event has no timeout.
_POLL_SECONDS = 0.002


class Snapshots:
    """Copies shards into the tensors of ``SnapshotSlots.shards``, contiguous and pinned if on CUDA."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        slots: Sequence[Mapping[str, torch.Tensor]],
        device: torch.device,
    ) -> None:
        self._slots = slots
        sources = [local_tensor(parameters[name]) for name in slots[0]]
        make_copies = _StreamCopies if device.type == "cuda" else _ThreadCopies
        self._copies = make_copies([list(slot.values()) for slot in slots], sources, device)

    def copy_into(
        self,
        slot: int,
        announce: Callable[[], None] = lambda: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the copy of the current shards and returns; called on the training thread.

        The caller must call :meth:`fence` before the parameters change again, and ensure that the
        slot is no longer read. This call calls ``announce`` once a :meth:`read` would wait for
        this copy, and no longer for an earlier one; nobody may read the slot before. ``wake`` is called to
        wake readers of the slot. On CPU the copying thread calls it, to spare the training thread.
        """
        self._copies.start(slot, announce, wake)

    def fence(self, timeout_seconds: float = _WAIT_SECONDS) -> None:
        """Orders later work after all copies; waits only on CPU. Raises if the last copy failed."""
        self._copies.fence(timeout_seconds)

    @property
    def stalled_seconds(self) -> float:
        """Seconds that the training stream waited at the last fence that it has passed; 0 on CPU."""
        return self._copies.stalled_seconds

    def read(self, slot: int, timeout_seconds: float = _WAIT_SECONDS) -> Shards:
        """Waits for the last copy into a slot, and returns its shards. Called on the gathering thread."""
        self._copies.wait_for(slot, timeout_seconds)
        return self._slots[slot]

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Waits for copies that were started, and ends the copying thread, or raises TimeoutError."""
        self._copies.close(timeout_seconds)


class _Copy:
    """One copy on the copying thread. ``error`` is the exception that ended it, if any."""

    def __init__(self, slot: int, wake: Callable[[], None]) -> None:
        self.slot, self.wake = slot, wake
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def wait(self, who: str, timeout_seconds: float) -> None:
        # is_set() comes first because wait() takes a lock, which may release the interpreter.
        if not self.ended.is_set() and not self.ended.wait(timeout_seconds):
            raise TimeoutError(
                f"{who} needs the copy of the shards into slot {self.slot}. The copy must end "
                f"within {timeout_seconds:g} s, but it has not ended. Check whether this host is "
                "short of memory or of cores."
            )
        if self.error is not None:
            raise RuntimeError(
                f"{who} needs the copy of the shards into slot {self.slot}, which failed: "
                f"{self.error}"
            ) from self.error


class _ThreadCopies:
    """Copies on CPU, on a thread.

    The training thread waits here only in a fence whose copy has not ended. Otherwise it never
    releases the GIL, because a busy thread could keep the GIL from it for up to 5 ms. A
    ``ThreadPoolExecutor`` would take locks that all executors of the process share.
    """

    stalled_seconds = 0.0

    def __init__(
        self, slots: list[list[torch.Tensor]], sources: list[torch.Tensor], device: torch.device
    ) -> None:
        assert device.type == "cpu", device
        self._queue: SimpleQueue[_Copy | None] = SimpleQueue()
        self._last_of_slot: list[_Copy | None] = [None] * len(slots)
        self._last: _Copy | None = None
        self._is_closed = False
        # When a thread first asks torch for its number of OpenMP threads, the number is fixed to
        # the value that any thread set last. The call here fixes the number of the training thread.
        # It is set again below, after the copying thread has set its own number.
        num_threads = torch.get_num_threads()
        is_settled = threading.Event()
        self._thread = threading.Thread(
            target=_copy_all,
            args=(self._queue, slots, sources, is_settled),
            name="snapshot-copy",
            daemon=True,
        )
        self._thread.start()
        if not is_settled.wait(_WAIT_SECONDS):
            raise TimeoutError(f"The thread snapshot-copy did not start in {_WAIT_SECONDS:g} s.")
        torch.set_num_threads(num_threads)

    def start(self, slot: int, announce: Callable[[], None], wake: Callable[[], None]) -> None:
        if self._is_closed:
            raise RuntimeError("No copy can be started, because the snapshots are closed.")
        copy = _Copy(slot, wake)
        self._last_of_slot[slot] = self._last = copy
        announce()
        self._queue.put(copy)

    def fence(self, timeout_seconds: float) -> None:
        if self._last is not None:
            self._last.wait("The optimizer step", timeout_seconds)

    def wait_for(self, slot: int, timeout_seconds: float) -> None:
        copy = self._last_of_slot[slot]
        assert copy is not None, f"slot {slot} was never filled"
        copy.wait("The weight push", timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"The thread snapshot-copy did not end in {timeout_seconds:g} s.")


def _copy_all(
    queue: "SimpleQueue[_Copy | None]",
    slots: list[list[torch.Tensor]],
    sources: list[torch.Tensor],
    is_settled: threading.Event,
) -> None:
    # A second team of OpenMP threads would take cores from the training thread's team. One
    # thread is enough for a copy that may take as long as a whole step. The first call fixes the
    # number, which is then set.
    torch.get_num_threads()
    torch.set_num_threads(1)
    yield_to_training()
    is_settled.set()
    with torch.no_grad():  # each thread has its own grad mode
        while (copy := queue.get()) is not None:
            time.sleep(_HEAD_START_SECONDS)
            try:
                # One call for all tensors releases and retakes the interpreter only once.
                if sources:  # a replica has nothing to copy
                    torch._foreach_copy_(slots[copy.slot], sources)
            except BaseException as error:  # the thread's boundary; the waiting thread raises it
                copy.error = error
            copy.ended.set()
            copy.wake()


class _StreamCopies:
    """Copies on CUDA: queues work on a side stream, into targets that are pinned and contiguous."""

    def __init__(
        self, slots: list[list[torch.Tensor]], sources: list[torch.Tensor], device: torch.device
    ) -> None:
        self._slots, self._sources = slots, sources
        self._device, self._stream = device, new_stream(device)
        self._copied: list[torch.cuda.Event | None] = [None] * len(slots)
        self._last: torch.cuda.Event | None = None
        self._fences: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._stalled_seconds = 0.0

    @torch.no_grad()
    def start(self, slot: int, announce: Callable[[], None], wake: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in zip(self._slots[slot], self._sources, strict=True):
                # The cast runs on the device. Its result lies in the memory pool of this stream,
                # which the allocator gives to no other stream.
                cast = source.to(target.dtype)
                target.copy_(cast, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        self._last = self._copied[slot] = copied
        announce()
        wake()

    def fence(self, timeout_seconds: float) -> None:
        if self._last is None:
            return
        self._drop_passed()
        stream = torch.cuda.current_stream()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self._last)
        after.record(stream)
        self._fences.append((before, after))

    @property
    def stalled_seconds(self) -> float:
        self._drop_passed()
        return self._stalled_seconds

    def _drop_passed(self) -> None:
        while self._fences and self._fences[0][1].query():
            before, after = self._fences.popleft()
            self._stalled_seconds = before.elapsed_time(after) / 1e3

    def wait_for(self, slot: int, timeout_seconds: float) -> None:
        copied = self._copied[slot]
        assert copied is not None, f"slot {slot} was never filled"
        # A thread that has no device yet would make a context on the first GPU.
        torch.cuda.set_device(self._device)
        deadline = time.monotonic() + timeout_seconds
        while not copied.query():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The copy of the shards into slot {slot} must end within "
                    f"{timeout_seconds:g} s, but it has not ended, because earlier work on the "
                    "training stream has not ended."
                )
            time.sleep(_POLL_SECONDS)

    def close(self, timeout_seconds: float) -> None:
        """Does nothing, because the stream ends with the process."""
