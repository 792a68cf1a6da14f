# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Imitates broadcasts over NCCL to servers that never answer, without a server or NCCL.

For the GPU, such a broadcast is a kernel that does not end. ``torch.cuda._sleep`` runs such a
kernel, too, and takes the place of ``dist.broadcast`` in :class:`DeviceBroadcast`. The buffers, the
streams, the events and the threads are the real ones. Unlike NCCL's kernel, which occupies up to four
multiprocessors, this kernel is one thread on one.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torchtitan.grpo.weight_wire import device_broadcast

_TRIAL_CYCLES = 50_000_000
_QUEUE_SECONDS = 30.0


_numbers = itertools.count()
"""Each silent server has a URL of its own, and so a stream of its own."""


class _SleepingDist:
    """Takes the place of ``torch.distributed`` in the module of :class:`DeviceBroadcast`."""

    ProcessGroup = dist.ProcessGroup

    def __init__(self, cycles: int) -> None:
        self._cycles = cycles
        self.queued = threading.Semaphore(0)

    def broadcast(self, tensor: torch.Tensor, src: int, group: object) -> None:
        """Queues the kernel on the current stream, where a broadcast would be queued."""
        torch.cuda._sleep(self._cycles)
        self.queued.release()


@contextmanager
def broadcast_to_silent_server(
    device: torch.device, payload: torch.Tensor, seconds: float, count: int = 1
) -> Iterator[Callable[[], bool]]:
    """Runs broadcasts of ``payload`` that nobody receives and that end after about ``seconds``.

    Args:
        device: The GPU.
        payload: [num_bytes] uint8 in pinned memory.
        seconds: How long each broadcast takes.
        count: Number of servers, each with a broadcast of its own.

    Yields:
        A function that returns whether all broadcasts are still under way.
    """
    stand_in = _SleepingDist(sleep_cycles(seconds))
    unused_group: Any = None
    errors: list[Exception] = []

    def send(url: str) -> None:
        try:
            sender = device_broadcast.DeviceBroadcast(device, url, payload.numel(), 20 * seconds)
            try:
                sender.send(payload, unused_group, lambda: False)
            finally:
                sender.close()
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(
            target=send,
            args=(f"http://silent-{next(_numbers)}",),
            name="check-gpu-push",
            daemon=True,
        )
        for _ in range(count)
    ]
    with mock.patch.object(device_broadcast, "dist", stand_in):
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _QUEUE_SECONDS
        num_queued = sum(
            stand_in.queued.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in threads
        )
        if num_queued == count:
            yield lambda: all(thread.is_alive() for thread in threads)
        for thread in threads:
            thread.join(20 * seconds)
    if errors:
        raise RuntimeError(f"A broadcast failed: {errors[0]}") from errors[0]
    if num_queued < count:
        raise RuntimeError(
            f"{count} broadcasts must be queued within {_QUEUE_SECONDS:g} s, but {num_queued} were."
        )


def sleep_cycles(seconds: float) -> int:
    """Returns the number of cycles for which ``torch.cuda._sleep`` takes about ``seconds``."""
    torch.cuda._sleep(_TRIAL_CYCLES)  # the first launch loads the kernel
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(_TRIAL_CYCLES)
    end.record()
    end.synchronize()
    return int(_TRIAL_CYCLES * seconds * 1e3 / begin.elapsed_time(end))
