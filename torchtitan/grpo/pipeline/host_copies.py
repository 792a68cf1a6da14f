# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Moves tensors from a device to the host and back, beside what the device computes.

On a GPU, copies run on a stream of their own, to and from pinned memory, and only events order the
two streams: the training stream waits for the arrival of a tensor that it is about to use, and
before it uses the memory of one that has left. The host never waits. Without a GPU, copies are
ordinary ones, so that the same tensors move.
"""

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
        self._leaving: list[tuple[Any, torch.Tensor]] = []
        self._leaving_longer: list[tuple[Any, torch.Tensor]] = []

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to copy a tensor to the host. Its memory is kept until :meth:`release`."""
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
        """Gives up the memory of tensors that began to leave before the last call.

        The training stream waits for their copies first. Called once a pass, it leaves each copy the
        time of a pass. To ask whether a copy is complete would not do: the host queues many passes
        ahead of the device, finds nothing complete, and would take new memory for each of them.
        """
        if self._leaving_longer:
            # Copies run in order, so that the last one's event stands for all.
            last, tensor = self._leaving_longer[-1]
            torch.cuda.current_stream(tensor.device).wait_event(last)
        self._leaving_longer, self._leaving = self._leaving, []

    def release_all(self) -> None:
        """Gives up the memory of all tensors that are leaving."""
        self.release()
        self.release()


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
