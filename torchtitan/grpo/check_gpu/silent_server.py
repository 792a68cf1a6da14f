# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Imitates a broadcast over NCCL to a server that never answers, without a server or NCCL.

For the GPU, such a broadcast is a kernel that does not end. ``torch.cuda._sleep`` runs such a
kernel, too, and takes the place of ``dist.broadcast`` in :class:`DeviceBroadcast`. The buffer, the
stream, the events and the thread are the real ones. Unlike NCCL's kernel, which occupies up to four
multiprocessors, this kernel occupies one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torchtitan.grpo.weight_wire import device_broadcast

_TRIAL_CYCLES = 50_000_000
_QUEUE_SECONDS = 30.0


class _SleepingDist:
    """Takes the place of ``torch.distributed`` in the module of :class:`DeviceBroadcast`."""

    ProcessGroup = dist.ProcessGroup

    def __init__(self, cycles: int) -> None:
        self._cycles = cycles
        self.is_queued = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, group: object) -> None:
        """Queues the kernel on the current stream, where a broadcast would be queued."""
        torch.cuda._sleep(self._cycles)
        self.is_queued.set()


@contextmanager
def broadcast_to_silent_server(
    device: torch.device, payload: torch.Tensor, seconds: float
) -> Iterator[Callable[[], bool]]:
    """Runs a broadcast of ``payload`` that nobody receives and that ends after about ``seconds``.

    Yields a function that returns whether the broadcast is still under way.
    """
    stand_in = _SleepingDist(sleep_cycles(seconds))
    unused_group: Any = None
    errors: list[Exception] = []

    def send() -> None:
        try:
            sender = device_broadcast.DeviceBroadcast(
                device, "http://silent", payload.numel(), 20 * seconds
            )
            try:
                sender.send(payload, unused_group, lambda: False)
            finally:
                sender.close()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=send, name="check-gpu-push", daemon=True)
    with mock.patch.object(device_broadcast, "dist", stand_in):
        thread.start()
        is_queued = stand_in.is_queued.wait(_QUEUE_SECONDS)
        if is_queued:
            yield thread.is_alive
        thread.join(20 * seconds)
    if errors:
        raise RuntimeError(f"The broadcast failed: {errors[0]}") from errors[0]
    if not is_queued:
        raise RuntimeError(
            f"The broadcast must be queued within {_QUEUE_SECONDS:g} s, but it has not been queued."
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
