# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Moves tensors from a device to the host and back, beside what the device computes.

On a GPU, copies run on a stream of their own, to and from pinned memory, and only events order the
two streams: the training stream waits for the arrival of a tensor that it is about to use, and for
nothing else. Without a GPU, copies are ordinary ones, so that the same tensors move.
"""

from collections import deque
from typing import Any

import torch


class HostCopies:
    """Copies of flat tensors.

    Args:
        device: Device on which the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to copy a tensor to the host. Its memory is kept until the copy is complete."""
        if self._stream is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._leaving.append((self._stream.record_event(), tensor))
        return host

    def to_device(self, host: torch.Tensor) -> "Arriving":
        """Begins to copy a tensor to the device."""
        if self._stream is None:
            return Arriving(host.clone(), None)
        tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        # The memory may have been used by work that is still queued on the training stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
        return Arriving(tensor, self._stream.record_event())

    def release(self) -> None:
        """Gives up the memory of tensors that have left. Does not wait."""
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()


class Arriving:
    """A tensor on its way to the device.

    Args:
        tensor: The tensor.
        event: What it takes for the tensor to be there; None if it is.
    """

    def __init__(self, tensor: torch.Tensor, event: Any) -> None:
        self._tensor, self._event = tensor, event

    def get(self) -> torch.Tensor:
        """Returns the tensor, for use on the current stream."""
        if self._event is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._event)
            self._event = None
        return self._tensor
