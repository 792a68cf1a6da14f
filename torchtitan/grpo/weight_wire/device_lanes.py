# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Streams and device buffers of transfers, which no other part of the process ever uses.

Whatever shares the stream of a transfer would wait for another process as well: FSDP's
collectives, the copies of a snapshot, or the transfer to another server. A lane belongs to one
peer at a time. It is kept for the life of the process, because only a call that waits for all
kernels of the device could free its memory.

Aborts of communicators are kept apart from broadcasts that make progress. An abort frees memory
of the GPU. For this, the driver may wait until the kernels of all other broadcasts have ended, and
meanwhile it holds up every launch, even those of training. An abort therefore waits until the
broadcasts under way have ended, and new broadcasts begin after it. An abort does not wait for
broadcasts that were given up, so that all of these can be aborted together. If the driver does not
finish an abort within a few seconds, broadcasts no longer wait for that abort, so that it delays
every other server only once.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchtitan.grpo.system.device import new_stream


@dataclass
class DeviceLane:
    """A stream of transfers with one peer, and a buffer on the device."""

    stream: torch.cuda.Stream
    device: torch.device
    is_taken: bool = False
    _buffer: torch.Tensor | None = None

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns [num_bytes] uint8 on the device; the lane's memory grows as needed."""
        if self._buffer is None or self._buffer.numel() < num_bytes:
            with torch.cuda.stream(self.stream):
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer[:num_bytes]

    def is_idle(self) -> bool:
        return not self.is_taken and self.stream.query()


_lanes: dict[tuple[torch.device, str], DeviceLane] = {}
_lock = threading.Lock()


def take_lane(device: torch.device, peer: str) -> DeviceLane:
    """Returns the peer's lane, which nobody else has until :func:`give_back`.

    ``peer`` is a server's URL, or a weight group's name. A peer without a lane takes over an idle
    one, whose peer has left. Raises RuntimeError if the peer's lane is in use, or a kernel on it
    has not ended.
    """
    torch.cuda.set_device(device)  # each thread has its own current device
    with _lock:
        lane = _lanes.get((device, peer))
        if lane is None:
            idle = (k for k, lane in _lanes.items() if k[0] == device and lane.is_idle())
            key = next(idle, None)
            lane = DeviceLane(new_stream(device), device) if key is None else _lanes.pop(key)
            _lanes[device, peer] = lane
        elif not lane.is_idle():
            raise RuntimeError(
                f"The former transfer with {peer} must have ended on the GPU before the next one "
                "begins, but its kernel still runs. It ends when its communicator is aborted."
            )
        lane.is_taken = True
        return lane


def give_back(lane: DeviceLane) -> None:
    """Lets another peer have the lane as soon as everything on its stream has ended."""
    with _lock:
        lane.is_taken = False


# Maximum time for which an abort waits for broadcasts, or all broadcasts together for an abort.
_WAIT_SECONDS = 5.0

_changed = threading.Condition()
_num_broadcasts = 0
# Until when broadcasts wait for each abort that is under way.
_aborts: dict[object, float] = {}


@contextmanager
def broadcasting() -> Iterator[None]:
    """Waits for aborts, then counts a broadcast as under way until the block ends."""
    global _num_broadcasts
    with _changed:
        while (seconds := max(_aborts.values(), default=0.0) - time.monotonic()) > 0:
            _changed.wait(seconds)
        _num_broadcasts += 1
    try:
        yield
    finally:
        with _changed:
            _num_broadcasts -= 1
            _changed.notify_all()


@contextmanager
def aborting() -> Iterator[None]:
    this = object()
    with _changed:
        _aborts[this] = time.monotonic() + 2 * _WAIT_SECONDS
        _changed.wait_for(lambda: not _num_broadcasts, _WAIT_SECONDS)
        _aborts[this] = time.monotonic() + _WAIT_SECONDS
    try:
        yield
    finally:
        with _changed:
            del _aborts[this]
            _changed.notify_all()
