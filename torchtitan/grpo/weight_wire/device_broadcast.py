# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Broadcasts host memory over NCCL, on a stream that nothing else waits for.

    host memory --copy engine--> one buffer on the device --NCCL--> the server's workers
                  \\______________ stream of this group ______________/

The kernel of a broadcast runs until the server has received, so whatever waits for its stream
waits for the server. Therefore each group has a stream and a buffer of its own, and the host
polls an event, with a deadline, where it could have waited for the stream.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

# How often the event at the end of a broadcast is polled.
_POLL_SECONDS = 0.0005


class DeviceBroadcast:
    """Used by one thread, the one that pushes to the group's server.

    Args:
        device: The GPU.
        largest_bucket: Number of bytes of the buffer.
        timeout_seconds: Maximum duration of one broadcast.
    """

    def __init__(self, device: torch.device, largest_bucket: int, timeout_seconds: float) -> None:
        # Each thread has its own current device.
        torch.cuda.set_device(device)
        self._device, self._timeout_seconds = device, timeout_seconds
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            # Allocated for this stream, so the allocator reuses the memory on no other.
            self._buffer = torch.empty(largest_bucket, dtype=torch.uint8, device=device)

    def send(
        self, payload: torch.Tensor, group: dist.ProcessGroup, is_left: Callable[[], bool]
    ) -> None:
        """Broadcasts a payload; returns when the server has received it.

        Args:
            payload: [num_bytes] uint8 in host memory. It may change when this method returns.
            group: The group, in which this rank is rank 0.
            is_left: Returns whether the group is being taken down.

        Raises:
            RuntimeError: If the group was left meanwhile.
            TimeoutError: If the server did not receive the payload in time.
        """
        with torch.cuda.stream(self._stream):
            buffer = self._buffer[: payload.numel()]
            buffer.copy_(payload, non_blocking=True)
            dist.broadcast(buffer, src=0, group=group)
            sent = torch.cuda.Event()
            sent.record(self._stream)
        deadline = time.monotonic() + self._timeout_seconds
        while not sent.query():
            if is_left():
                raise RuntimeError("The group was left during a broadcast.")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The server must receive {payload.nbytes} bytes within "
                    f"weight_sync.timeout_seconds = {self._timeout_seconds:g}, but the broadcast "
                    "has not ended. Check the server's log, or raise the setting."
                )
            time.sleep(_POLL_SECONDS)
