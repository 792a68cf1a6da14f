# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Copies of this rank's shards, taken at a step boundary.

The training thread only starts a copy and goes on, cast to wire dtype included:

- On CUDA the copy runs on a side stream, and :meth:`Snapshots.fence` orders the next
  optimizer step after it, on the device alone.
- On CPU it runs on the thread ``snapshot-copy``, one copy at a time in the order in which
  they were started, and the fence before the next optimizer step is the only thing that may
  wait.

So nobody writes a slot that is still copied into, whichever slot comes next, and a step
without an optimizer step needs no fence. That nobody writes what is still read is the
business of `slots.py`.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from typing import Literal

import torch

from torchtitan.grpo.models.shards import local_tensor
from torchtitan.grpo.weight_sync.priority import yield_to_training
from torchtitan.grpo.weight_sync.slot_layout import Shards

Staging = Literal["device", "host"]
_WAIT_SECONDS = 120.0
# What the end of a copy wakes up, on all ranks, must not find the training thread still at the
# boundary, where it would compete for the interpreter and, with few cores, for a core.
_HEAD_START_SECONDS = 0.003
# How often a reader asks a device whether it is done; an event has no wait with a bound.
_POLL_SECONDS = 0.0005


def _nobody() -> None:
    """Nobody waits."""


def device_slots(
    parameters: Mapping[str, torch.Tensor],
    names: Collection[str],
    num_slots: int,
    wire_dtype: torch.dtype,
    staging: Staging,
) -> list[dict[str, torch.Tensor]]:
    """Slots for shards that lie on a CUDA device.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        names: Those that it sends.
        num_slots: How many slots.
        wire_dtype: Dtype in which weights travel.
        staging: In the training device's memory or in pinned host memory.
    """

    def room_for(source: torch.Tensor) -> torch.Tensor:
        if staging == "host":
            # In plain order, whatever the order of the source: see `_StreamCopies.start`.
            return torch.empty(source.shape, dtype=wire_dtype, pin_memory=True)
        return torch.empty_like(source, dtype=wire_dtype)

    sources = {name: local_tensor(parameters[name]) for name in names}
    return [{name: room_for(source) for name, source in sources.items()} for _ in range(num_slots)]


class Snapshots:
    """Copies of local shards in the wire dtype.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        slots: Where the copies go, by name, in the wire dtype; what is in none of them is not
            copied. See `slot_memory.py`, or :func:`device_slots`.
        device: The training device.
    """

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
        announce: Callable[[], None] = _nobody,
        wake: Callable[[], None] = _nobody,
    ) -> None:
        """Starts the copy of the current shards and returns; called on the training thread.

        Between this and the next change of the parameters there must be a :meth:`fence`.
        Nobody may read the slot any more, or hold on to it.

        Args:
            slot: Where to.
            announce: Called here, once :meth:`read` waits for this copy and no longer for a
                former one: only then may a reader be told of the slot.
            wake: Called when readers may look: on CPU by the copying thread, once it is
                done, so that the training thread wakes up no other thread than that.
        """
        self._copies.start(slot, announce, wake)

    def fence(self, timeout_seconds: float = _WAIT_SECONDS) -> None:
        """Orders what the training thread does next after all copies that were started.

        Args:
            timeout_seconds: Bound of the wait, which there is on CPU only.

        Raises:
            RuntimeError: The last copy failed.
            TimeoutError: It did not end in time.
        """
        self._copies.fence(timeout_seconds)

    def read(self, slot: int, timeout_seconds: float = _WAIT_SECONDS) -> Shards:
        """The slot's shards, once their copy is done; called on the publisher's thread.

        Raises:
            RuntimeError: The copy failed.
            TimeoutError: It did not end in time.
        """
        self._copies.wait_for(slot, timeout_seconds)
        return self._slots[slot]

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Waits for what is being copied, and ends the thread.

        Raises:
            TimeoutError: It did not end in time; it is left to the process's end.
        """
        self._copies.close(timeout_seconds)


class _Copy:
    """One copy on the copy thread. ``error`` is what ended it, if something did."""

    def __init__(self, slot: int, wake: Callable[[], None]) -> None:
        self.slot, self.wake = slot, wake
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def wait(self, who: str, timeout_seconds: float) -> None:
        # Asked first without a lock: waiting would let another thread have the interpreter.
        if not self.ended.is_set() and not self.ended.wait(timeout_seconds):
            raise TimeoutError(
                f"{who} needs the copy of the shards into slot {self.slot}, which must end "
                f"within {timeout_seconds:g} s and has not. Is this host out of memory or of cores?"
            )
        if self.error is not None:
            raise RuntimeError(
                f"{who} needs the copy of the shards into slot {self.slot}, which failed: "
                f"{self.error}"
            ) from self.error


class _ThreadCopies:
    """Copies on CPU, by a thread.

    What the training thread does here never waits and never lets go of the interpreter,
    unless there is something to wait for: with another busy thread it would get it back up
    to 5 ms later. That is why this is no ``ThreadPoolExecutor``, whose ``submit`` takes locks
    that all executors of the process share.
    """

    def __init__(
        self, slots: list[list[torch.Tensor]], sources: list[torch.Tensor], device: torch.device
    ) -> None:
        assert device.type == "cpu", device
        self._queue: SimpleQueue[_Copy | None] = SimpleQueue()
        self._last_of_slot: list[_Copy | None] = [None] * len(slots)
        self._last: _Copy | None = None
        self._is_closed = False
        # A thread computes with as many others as torch was last told, by anyone, when the
        # thread first asked. Asking settles this thread's number, and it is told again below
        # after the copy thread told its own.
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
            raise RuntimeError("No copy can be started: the snapshots are closed.")
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
    # A second team of OpenMP threads beside the training thread's would take its cores; one
    # thread is enough for a copy that has a whole step's time. Asking makes it stay.
    torch.get_num_threads()
    torch.set_num_threads(1)
    yield_to_training()
    is_settled.set()
    with torch.no_grad():  # a thread's own setting
        while (copy := queue.get()) is not None:
            time.sleep(_HEAD_START_SECONDS)
            try:
                # One call for all, which gives the interpreter back once and not for each.
                if sources:  # a replica sends nothing
                    torch._foreach_copy_(slots[copy.slot], sources)
            except BaseException as error:  # the thread's boundary: kept for who waits
                copy.error = error
            copy.ended.set()
            copy.wake()


class _StreamCopies:
    """Copies on CUDA, by a side stream."""

    def __init__(
        self, slots: list[list[torch.Tensor]], sources: list[torch.Tensor], device: torch.device
    ) -> None:
        self._slots, self._sources = slots, sources
        self._stream = torch.cuda.Stream(device)
        self._copied: list[torch.cuda.Event | None] = [None] * len(slots)
        self._last: torch.cuda.Event | None = None

    @torch.no_grad()
    def start(self, slot: int, announce: Callable[[], None], wake: Callable[[], None]) -> None:
        targets = self._slots[slot]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if targets and targets[0].is_cuda:
                torch._foreach_copy_(targets, self._sources, non_blocking=True)
            else:
                # With non_blocking torch casts on the source's device, into a temporary of
                # this stream, and then copies bytes into pinned memory without waiting.
                # (Without it the cast is made on the host.) It waits after all where the
                # target is neither pinned nor in plain order.
                for target, source in zip(targets, self._sources, strict=True):
                    target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        self._last = self._copied[slot] = copied
        announce()
        wake()

    def fence(self, timeout_seconds: float) -> None:
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)

    def wait_for(self, slot: int, timeout_seconds: float) -> None:
        copied = self._copied[slot]
        assert copied is not None, f"slot {slot} was never filled"
        deadline = time.monotonic() + timeout_seconds
        while not copied.query():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The copy of the shards into slot {slot} must end within "
                    f"{timeout_seconds:g} s and has not: the training stream before it is stuck."
                )
            time.sleep(_POLL_SECONDS)

    def close(self, timeout_seconds: float) -> None:
        """Nothing to end: the stream goes with the process."""
