# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A server's end of a weight group, which it can leave even while it waits for a broadcast.

A broadcast over NCCL runs on a stream that nothing else uses (`device_lanes.py`); the receiving
thread polls an event, with a deadline.
"""

import contextlib
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan.grpo.weight_wire.device_lanes import DeviceLane, give_back, take_lane
from torchtitan.grpo.weight_wire.process_group import create_weight_group, destroy_weight_group
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

T = TypeVar("T")

# How often a waiting receive checks whether its group was left.
_POLL = timedelta(seconds=0.1)

# Groups that were left while a gloo operation was outstanding, with that operation. Dropping the
# last reference to a group joins gloo's threads, which blocks until the trainer closes its end.
_abandoned: list[tuple[dist.ProcessGroup, dist.Work]] = []
# Held while the two lists change.
_keeping = threading.Lock()
# Buffers of broadcasts over NCCL that were given up, with the event at the end of the broadcast and
# the device. Its kernel may write into the buffer until then, so nobody else may get that memory.
_written: list[tuple[torch.Tensor, torch.cuda.Event, torch.device]] = []
# Maximum time for which leaving groups waits for the driver.
_LEAVE_SECONDS = 5.0
# How often the end of a broadcast over NCCL is polled.
_POLL_EVENT_SECONDS = 0.002


class WeightGroup:
    """A process group in which rank 0, the trainer, broadcasts to this worker of the server."""

    def __init__(self, info: WeightGroupInfo, worker: int = 0) -> None:
        self.name, self._piece_bytes = info.group_name, info.piece_bytes
        self.is_nccl = info.backend == "nccl"
        self.timeout_seconds = info.timeout_seconds
        self._left = threading.Event()
        self._outstanding: dist.Work | None = None
        # Held while broadcasts over NCCL are launched, which the abort ends; the lane is given back then.
        self._launching = threading.Lock()
        self._lane: DeviceLane | None = None
        _let_go_of_ended()
        self._group = create_weight_group(info, info.rank_offset + worker)

    def receive(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        turn: AbstractContextManager[None] = nullcontext(),  # noqa: B008  (it has no state)
    ) -> None:
        """Receives one payload of rank 0 into ``tensor``, contiguous and of the payload's size.

        Over NCCL, ``tensor`` may lie on the device, or in pinned host memory, into which the device
        copies each piece. ``turn`` is entered while broadcasts are launched; see ``LaunchOrder`` in
        `staging.py`. Raises RuntimeError if the trainer has ended, nothing arrives in time, or the
        group is left.
        """
        if self._left.is_set():
            raise RuntimeError(f"Group {self.name!r} was left before the broadcast.")
        if self.is_nccl:
            self._receive_on_stream(tensor, device, turn)
            return
        work = self._outstanding = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        assert work is not None, "this server is a member of the group"
        self._wait(work)
        self._outstanding = None

    def _receive_on_stream(
        self, tensor: torch.Tensor, device: torch.device, turn: AbstractContextManager[None]
    ) -> None:
        with self._launching:
            received = self._launch(tensor, device, turn)
        deadline = time.monotonic() + self.timeout_seconds
        while not (received.query() or self._left.is_set() or time.monotonic() > deadline):
            time.sleep(_POLL_EVENT_SECONDS)
        # An aborted broadcast ends as well, without the bytes.
        if self._left.is_set() or not received.query():
            _keep(_written, (tensor, received, device))
            raise self._given_up()

    def _launch(
        self, tensor: torch.Tensor, device: torch.device, turn: AbstractContextManager[None]
    ) -> torch.cuda.Event:
        """Queues the broadcasts of a payload's pieces; returns the event at their end."""
        if self._left.is_set():
            raise self._given_up()
        if self._lane is None:
            self._lane = take_lane(device, self.name)
        lane, stream, received = self._lane, self._lane.stream, torch.cuda.Event()
        # The allocator may have taken the memory from tensors that kernels of this stream, which
        # are queued, still read.
        stream.wait_stream(torch.cuda.current_stream(device))
        payload = tensor.view(-1).view(torch.uint8)
        with turn, torch.cuda.stream(stream):
            try:
                for piece in payload.split(self._piece_bytes or max(payload.numel(), 1)):
                    if tensor.device.type == device.type:
                        dist.broadcast(piece, src=0, group=self._group)
                    else:
                        buffer = lane.buffer(piece.numel())
                        dist.broadcast(buffer, src=0, group=self._group)
                        piece.copy_(buffer, non_blocking=True)
                received.record(stream)
            except BaseException:  # earlier pieces are queued, and may still be written
                received.record(stream)
                _keep(_written, (tensor, received, device))
                raise
        return received

    def _given_up(self) -> RuntimeError:
        if self._left.is_set():
            return RuntimeError(f"Group {self.name!r} was left while a broadcast was awaited.")
        return RuntimeError(
            f"No broadcast arrived in group {self.name!r} within {self.timeout_seconds} s."
        )

    def _wait(self, work: dist.Work) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        while not work.is_completed():
            if self._left.is_set() or time.monotonic() > deadline:
                _keep(_abandoned, (self._group, work))
                raise self._given_up()
            # Raises at the timeout of the poll, when the work may be complete, and on a failure
            # of the operation, which the last wait raises again.
            with contextlib.suppress(RuntimeError):
                work.wait(_POLL)
        work.wait()

    def begin_leave(self) -> threading.Thread | None:
        """Makes :meth:`receive` fail. Over NCCL, returns the thread that leaves the group. Idempotent."""
        if self._left.is_set():
            return None
        self._left.set()
        if self.is_nccl:
            name = f"weight-leave-{self.name}"
            thread = threading.Thread(target=self._destroy, name=name, daemon=True)
            thread.start()
            return thread
        if (outstanding := self._outstanding) is not None:
            # Kept before the waiting thread can end and drop its reference.
            _keep(_abandoned, (self._group, outstanding))
        self._destroy()
        return None

    def _destroy(self) -> None:
        try:
            destroy_weight_group(self._group)
        finally:
            with self._launching:  # which the abort has ended
                if self._lane is not None:
                    give_back(self._lane)


def leave_groups(groups: Iterable[WeightGroup]) -> None:
    """Leaves groups, all at the same time; a :meth:`WeightGroup.receive` that waits fails.

    An aborted communicator frees memory of the GPU, for which the driver may wait until the kernels
    of the other groups have ended too. After a few seconds, leaving goes on in the background.
    """
    threads = [thread for group in groups if (thread := group.begin_leave()) is not None]
    deadline = time.monotonic() + _LEAVE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _keep(entries: list[T], entry: T) -> None:
    with _keeping:
        entries.append(entry)


def _let_go_of_ended() -> None:
    """Drops the groups and buffers of abandoned operations that have ended, so that nothing blocks."""
    with _keeping:
        _abandoned[:] = [(group, work) for group, work in _abandoned if not work.is_completed()]
        for _, _, device in _written:
            torch.cuda.set_device(device)  # each thread has its own current device
        _written[:] = [entry for entry in _written if not entry[1].query()]
