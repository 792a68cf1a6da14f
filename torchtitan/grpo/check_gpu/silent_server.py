# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A broadcast over NCCL to a server that never answers, without a server and without NCCL.

To the GPU such a broadcast is a kernel that runs on and on. ``torch.cuda._sleep`` is one, too. It
takes the place of ``dist.broadcast`` in the product's :class:`DeviceBroadcast`, whose buffer,
stream, events and thread are the real ones. Unlike NCCL's kernel it occupies one multiprocessor
alone, and not up to four.
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
def broadcast_to_nobody(
    device: torch.device, payload: torch.Tensor, seconds: float
) -> Iterator[Callable[[], bool]]:
    """Sends ``payload`` to nobody for about ``seconds``; yields whether it is still under way."""
    stand_in = _SleepingDist(sleep_cycles(seconds))
    nobody: Any = None
    errors: list[Exception] = []

    def send() -> None:
        try:
            sender = device_broadcast.DeviceBroadcast(device, payload.numel(), 20 * seconds)
            sender.send(payload, nobody, lambda: False)
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
        raise RuntimeError(f"The broadcast must be queued in {_QUEUE_SECONDS:g} s and was not.")


def sleep_cycles(seconds: float) -> int:
    """Returns how many cycles ``torch.cuda._sleep`` needs for about ``seconds``."""
    torch.cuda._sleep(_TRIAL_CYCLES)  # its first launch loads the kernel
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(_TRIAL_CYCLES)
    end.record()
    end.synchronize()
    return int(_TRIAL_CYCLES * seconds * 1e3 / begin.elapsed_time(end))
