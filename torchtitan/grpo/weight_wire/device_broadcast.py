# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Broadcasts host memory over NCCL, on a stream that nothing else waits for.

    host memory --copy engine--> one piece on the device --NCCL--> the server's workers
                  \______________ stream of this server ______________/

The kernel of a broadcast runs until the server has received the data, so each server has its own stream
and buffer (`device_lanes.py`), and the host polls an event, with a deadline.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchtitan.grpo.weight_wire.device_lanes import broadcasting, give_back, take_lane

# How often the event at the end of a broadcast is polled. Each look takes the interpreter's lock from
# the training thread.
_POLL_SECONDS = 0.002


class DeviceBroadcast:
    """Broadcasts to one server; used by one thread, the one that pushes to the server.

    A payload is sent in pieces through one device buffer, within ``timeout_seconds``. The constructor
    raises RuntimeError if a kernel of an earlier broadcast to the server has not ended, or the GPU
    has no room for a piece.
    """

    def __init__(
        self, device: torch.device, server_url: str, piece_bytes: int, timeout_seconds: float
    ) -> None:
        self._lane = take_lane(device, server_url)
        try:
            self._lane.buffer(piece_bytes)  # now, and not between two training steps
        except RuntimeError:  # out of memory, as it may no longer be when the server joins again
            give_back(self._lane)
            raise
        self._piece_bytes, self._timeout_seconds = piece_bytes, timeout_seconds

    def close(self) -> None:
        give_back(self._lane)

    def send(
        self, payload: torch.Tensor, group: dist.ProcessGroup, is_left: Callable[[], bool]
    ) -> None:
        """Broadcasts ``payload``, [num_bytes] uint8 in host memory, and waits until the server has received it.

        Raises RuntimeError if the group ``is_left`` meanwhile, and TimeoutError if the server did
        not receive the payload in time.
        """
        with broadcasting():
            stream, is_pinned = self._lane.stream, payload.is_pinned()
            deadline = time.monotonic() + self._timeout_seconds

            def wait_for(event: torch.cuda.Event) -> None:
                while not event.query():
                    if is_left():
                        raise RuntimeError("The group was left during a broadcast.")
                    if time.monotonic() > deadline:
                        raise self._was_late(payload.nbytes)
                    time.sleep(_POLL_SECONDS)

            read, sent = torch.cuda.Event(), torch.cuda.Event()
            with torch.cuda.stream(stream):
                for piece in payload.split(self._piece_bytes):
                    buffer = self._lane.buffer(piece.numel())
                    buffer.copy_(piece, non_blocking=True)
                    read.record(stream)  # the last time counts
                    dist.broadcast(buffer, src=0, group=group)
                    sent.record(stream)
                    if not is_pinned:
                        # The copy of the next piece from pageable memory would block this thread,
                        # beyond every deadline, until the server has received this one.
                        wait_for(sent)
            for event in (read, sent):  # the payload may change even if the broadcast is given up
                wait_for(event)

    def _was_late(self, num_bytes: int) -> TimeoutError:
        return TimeoutError(
            f"The server must receive {num_bytes} bytes within weight_sync.timeout_seconds = "
            f"{self._timeout_seconds:g}, but the broadcast has not ended. Check the server's "
            "log, or raise the setting."
        )
