# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps activations of pipeline stages in host memory until their backward pass.

A pipeline rank holds the activations of several microbatches at the same time, and it does not need
most of them for many passes. PipeOffload (https://arxiv.org/abs/2503.01328) moves the activations
that are held longest to the host. `offload_plan.py` selects them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from torchtitan.grpo.pipeline.host_copies import Arriving, HostCopies

Key = tuple[int, int]
"""Stage and microbatch of a forward pass."""

LEAST_BYTES = 1 << 16
"""Smaller tensors stay on the device, because starting a copy takes longer than copying them."""


class ActivationOffload:
    """The activations of one rank that lie in host memory.

    Args:
        device: Device on which the stages compute.
        least_bytes: Minimum size of tensors that are moved.

    Attributes:
        host_bytes: Number of bytes that are on the host now.
        peak_host_bytes: Maximum of ``host_bytes`` so far.
        moved_bytes: Number of bytes that were moved so far.
        saved_bytes: For each stage, the number of bytes that its last forward pass in the context
            :meth:`saving` has moved, or could have moved.
    """

    def __init__(self, device: torch.device, least_bytes: int = LEAST_BYTES) -> None:
        self.copies, self._least_bytes = HostCopies(device), least_bytes
        self._device_type = device.type
        self._moved: dict[Key, dict[Any, _Moved]] = {}
        self.host_bytes = self.peak_host_bytes = self.moved_bytes = 0
        self.saved_bytes: dict[int, int] = {}

    @contextmanager
    def saving(
        self, key: Key, module: nn.Module, inputs: Iterable[Any], *, moves: bool = True
    ) -> Iterator[None]:
        """Makes the forward pass in the context move its activations to the host.

        Args:
            key: The pass.
            module: Module of the stage. Its parameters and buffers are not moved.
            inputs: Inputs of the pass. They are not moved, because other objects hold them too.
            moves: Whether tensors are moved. Otherwise, they are only counted.
        """
        fixed = [*module.parameters(), *module.buffers()]
        held = [t for t in inputs if isinstance(t, torch.Tensor)]
        staying = {_address(tensor) for tensor in (*fixed, *held)}
        # Autocast makes copies of weights, which all microbatches share. They are not moved either.
        weights = {_local(p).shape for p in fixed if p.dim() > 1}
        weights |= {shape[::-1] for shape in weights}
        moved: dict[Any, _Moved] = {}
        originals: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> Any:
            local = _local(tensor)
            if not self._is_movable(local) or local.shape in weights or _address(local) in staying:
                return tensor
            flat = local.detach().as_strided((local.numel(),), (1,))
            where = (flat.data_ptr(), flat.numel(), flat.dtype)
            if where not in moved:
                moved[where] = _Moved(flat, self.copies if moves else None)
                # The reference prevents another tensor from using the same address in this pass.
                originals.append(flat)
            return _Saved(moved[where], tensor) if moves else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
        originals.clear()  # autograd keeps the hooks, and the hooks keep this list
        self.saved_bytes[key[0]] = sum(one.nbytes for one in moved.values())
        if moves:
            self._moved[key] = moved
            self.host_bytes += self.saved_bytes[key[0]]
            self.moved_bytes += self.saved_bytes[key[0]]
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def fetch(self, key: Key) -> None:
        """Starts to copy the activations of a pass back to the device, if they were moved."""
        for moved in self._moved.get(key, {}).values():
            moved.fetch()

    def forget(self, key: Key) -> None:
        """Frees the host memory of a microbatch whose backward pass has run."""
        for moved in self._moved.pop(key, {}).values():
            self.host_bytes -= moved.nbytes
            moved.forget()

    def forget_all(self) -> None:
        """Frees all host memory, including memory that a step left after an exception."""
        for key in list(self._moved):
            self.forget(key)
        self.copies.release_all()

    def _is_movable(self, local: torch.Tensor) -> bool:
        # A tensor whose collective is still running has another type.
        return (
            type(local) is torch.Tensor
            and local.device.type == self._device_type
            and local.nbytes >= self._least_bytes
            and _is_dense(local)
        )


class _Moved:
    """Memory that was moved to the host.

    Args:
        flat: The memory as a flat tensor.
        copies: Moves the memory; None if it is only counted.
    """

    def __init__(self, flat: torch.Tensor, copies: HostCopies | None) -> None:
        self.nbytes, self._copies = flat.nbytes, copies
        self._host = None if copies is None else copies.to_host(flat)
        self._arriving: Arriving | None = None

    def fetch(self) -> Arriving:
        """Starts to copy the memory back to the device, unless the copy was started before."""
        if self._arriving is None:
            assert self._copies is not None and self._host is not None, "nothing was moved"
            self._arriving = self._copies.to_device(self._host)
        return self._arriving

    def forget(self) -> None:
        """Orders the training stream after a copy to the device that was started, if there is one.

        Memory from the training stream's pool must not be freed while another stream fills it.
        """
        if self._arriving is not None:
            self._arriving.get()


class _Saved:
    """The object that autograd keeps in place of a tensor."""

    def __init__(self, moved: _Moved, tensor: torch.Tensor) -> None:
        local = _local(tensor)
        self._moved, self._shape, self._stride = moved, local.shape, local.stride()
        self._layout = None
        if isinstance(tensor, DTensor):
            self._layout = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def restore(self) -> torch.Tensor:
        local = self._moved.fetch().get().as_strided(self._shape, self._stride)
        if self._layout is None:
            return local
        mesh, placements, shape, stride = self._layout
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )


def _unpack(saved: Any) -> torch.Tensor:
    return saved.restore() if isinstance(saved, _Saved) else saved


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _address(tensor: torch.Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements fill their memory without gaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
