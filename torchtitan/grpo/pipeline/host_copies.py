# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Moves tensors from a device to the host and back while the device computes.

On a GPU, copies run on a stream of their own, to and from pinned memory, and only events order the
two streams. The training stream waits for the arrival of a tensor before it uses the tensor, and it
waits for the copy of a tensor to the host before it reuses the tensor's memory. The host never waits.
Without a GPU, the same tensors are copied by ordinary copies.
"""

from typing import Any

import torch

from torchtitan.grpo.system.own_streams import new_stream


class HostCopies:
    """Starts and tracks copies of flat tensors.

    Args:
        device: Device on which the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._leaving: list[tuple[Any, torch.Tensor]] = []
        self._leaving_longer: list[tuple[Any, torch.Tensor]] = []

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Starts to copy a tensor to the host. Its memory is kept until :meth:`release`."""
        if self._stream is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._leaving.append((self._stream.record_event(), tensor))
        return host

    def to_device(self, host: torch.Tensor) -> "Arriving":
        """Starts to copy a tensor to the device."""
        if self._stream is None:
            return Arriving(host.clone(), None)
        tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        # Work that is still queued on the training stream may use the same memory.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
        return Arriving(tensor, self._stream.record_event())

    def release(self) -> None:
        """Frees the memory of tensors whose copies were started before the previous call.

        The training stream waits for these copies first. The method is called once per pass, so that
        each copy has the time of a pass. It does not ask whether a copy is complete, because the host
        queues many passes ahead of the device. It would find no copy complete and would allocate new
        memory for each pass.
        """
        if self._leaving_longer:
            # Copies run in order, so waiting for the last one is enough.
            last, tensor = self._leaving_longer[-1]
            torch.cuda.current_stream(tensor.device).wait_event(last)
        self._leaving_longer, self._leaving = self._leaving, []

    def release_all(self) -> None:
        """Frees the memory of all tensors whose copies to the host were started."""
        self.release()
        self.release()


class Arriving:
    """A tensor that is being copied to the device.

    Args:
        tensor: The tensor.
        event: Event at which the copy is complete. None if it is complete already.
    """

    def __init__(self, tensor: torch.Tensor, event: Any) -> None:
        self._tensor, self._event = tensor, event

    def get(self) -> torch.Tensor:
        """Returns the tensor, for use on the current stream."""
        if self._event is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._event)
            self._event = None
        return self._tensor
