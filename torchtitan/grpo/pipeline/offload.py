# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps activations of pipeline stages in host memory until their backward pass.

The activations that are held longest are moved, as in PipeOffload (https://arxiv.org/abs/2503.01328).
"""

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from torchtitan.grpo.pipeline.tables.actions import Action, Costs, Table
from torchtitan.grpo.pipeline.tables.simulate import Simulation, simulate
from torchtitan.grpo.system.device import new_stream
from torchtitan.grpo.system.logs import logger


class HostCopies:
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

        The training stream waits for these copies first. With one call per pass, each copy has the
        time of a pass. The host does not ask which copies are complete: it runs too far ahead.
        """
        if self._leaving_longer:
            # Copies run in order, so waiting for the last one is enough.
            last, tensor = self._leaving_longer[-1]
            torch.cuda.current_stream(tensor.device).wait_event(last)
        self._leaving_longer, self._leaving = self._leaving, []

    def release_all(self) -> None:
        self.release()
        self.release()


class Arriving:
    """A tensor that is being copied to the device, or is already there if ``event`` is None."""

    def __init__(self, tensor: torch.Tensor, event: Any) -> None:
        self._tensor, self._event = tensor, event

    def get(self) -> torch.Tensor:
        """Returns the tensor, for use on the current stream."""
        if self._event is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._event)
            self._event = None
        return self._tensor


Key = tuple[int, int]
"""Stage and microbatch of a forward pass."""

LEAST_BYTES = 1 << 16
"""Smaller tensors stay on the device, because starting a copy takes longer than copying them."""


class ActivationOffload:
    """Keeps one rank's activations in host memory: the tensors of at least ``least_bytes``.

    ``saved_bytes`` is, by stage, what its last pass in :meth:`saving` moved or could have moved.
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
        """Context that moves a forward pass's activations to the host, or, without ``moves``, counts them.

        Parameters, buffers and inputs are not moved, because other objects hold them too.
        """
        fixed = [*module.parameters(), *module.buffers()]
        held = [t for t in inputs if isinstance(t, torch.Tensor)]
        staying = {_address(tensor) for tensor in (*fixed, *held)}
        # Autocast makes copies of weights, which all microbatches share. They are not moved either.
        weights = {_local(p).shape for p in fixed if p.dim() > 1}
        weights |= {shape[::-1] for shape in weights}
        moved: dict[Any, _Moved] = {}
        originals: dict[Any, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> Any:
            local = _local(tensor)
            if not self._is_movable(local) or local.shape in weights or _address(local) in staying:
                return tensor
            flat = local.detach().as_strided((local.numel(),), (1,))
            where = (flat.data_ptr(), flat.numel(), flat.dtype)
            if where not in originals:
                # The reference prevents another tensor from using the same address in this pass.
                originals[where] = flat
                if moves:
                    moved[where] = _Moved(flat, self.copies)
            return _Saved(moved[where], tensor) if moves else tensor

        def unpack(saved: Any) -> torch.Tensor:
            return saved.restore() if isinstance(saved, _Saved) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.saved_bytes[key[0]] = saved = sum(flat.nbytes for flat in originals.values())
        originals.clear()  # autograd keeps the hooks, and the hooks keep this dict
        if moves:
            self._moved[key] = moved
            self.host_bytes += saved
            self.moved_bytes += saved
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def fetch(self, key: Key) -> None:
        """Starts to copy the activations of a pass back to the device, if they were moved."""
        for moved in self._moved.get(key, {}).values():
            moved.fetch()

    def forget(self, key: Key) -> None:
        for moved in self._moved.pop(key, {}).values():
            self.host_bytes -= moved.nbytes
            moved.forget()

    def forget_all(self) -> None:
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
    """A flat tensor that was moved to the host."""

    def __init__(self, flat: torch.Tensor, copies: HostCopies) -> None:
        self.nbytes, self._copies, self._host = flat.nbytes, copies, copies.to_host(flat)
        self._arriving: Arriving | None = None

    def fetch(self) -> Arriving:
        if self._arriving is None:
            self._arriving = self._copies.to_device(self._host)
        return self._arriving

    def forget(self) -> None:
        """Waits for a copy under way, so that it does not write into memory that was already freed."""
        if self._arriving is not None:
            self._arriving.get()


class _Saved:
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


AUTO = -1
"""Value of ``grpo.pipeline_offload`` with which the measured bandwidth determines the share."""

_LINK_SHARE = 0.8
"""Share of a pass during which copies may use the link, so that small delays do not accumulate."""
_PROBE_BYTES = 64 * 2**20
_MEASURED_PASS = 2
"""Number of the timed pass; the first one compiles kernels and allocates memory."""


class OffloadPlan:
    def __init__(self, device: torch.device, share: float) -> None:
        self.memory = ActivationOffload(device)
        self._device, self._share = device, share
        self._away: set[Key] = set()
        self._next: dict[Key, Key] = {}
        self._num_passes = 0
        self._costs: Costs | None = None
        self._bandwidth = 0.0

    @property
    def measures(self) -> bool:
        return self._share == AUTO and self._num_passes == _MEASURED_PASS

    def begin(self, table: Table, simulation: Simulation, rank: int) -> None:
        """Plans a step from a table and its simulation with assumed costs."""
        self._num_passes += 1
        self.memory.forget_all()
        actions = table.actions[rank]
        backward = [(a.stage, a.microbatch) for a in actions if a.kind in ("I", "B")]
        self._next = dict(itertools.pairwise(backward))
        if self._share != AUTO:
            kept = kept_for(actions, simulation)
            self._away = set(longest_kept(kept)[: int(self._share * len(kept))])
        elif self._costs is not None:
            exact = simulate(table, self._costs)
            self._away = hidden_by_link(
                kept_for(actions, exact), self.memory.saved_bytes, self._bandwidth, exact.makespan
            )

    def learn(self, costs: Costs) -> None:
        """Measures the bandwidth, and uses the costs of a timed step for planning from now on."""
        self._costs = costs
        self._bandwidth = measured_bandwidth(self.memory, self._device)
        logger.info(
            "Activations of a microbatch that can be moved to host memory: "
            + ", ".join(
                f"stage {s}: {b / 2**20:.1f} MiB" for s, b in self.memory.saved_bytes.items()
            )
            + f". Copies run at {self._bandwidth / 1e9:.1f} GB/s (grpo.pipeline_offload)."
        )

    def forward(
        self, key: Key, module: nn.Module, inputs: Iterable[Any]
    ) -> AbstractContextManager[None]:
        self.memory.copies.release()
        if key in self._away:
            return self.memory.saving(key, module, inputs)
        if self.measures:
            return self.memory.saving(key, module, inputs, moves=False)
        return nullcontext()

    def before_backward(self, key: Key) -> None:
        """Starts to copy back the activations of the backward pass that begins and of the next one."""
        self.memory.fetch(key)
        if key in self._next:
            self.memory.fetch(self._next[key])

    def after_backward(self, key: Key) -> None:
        self.memory.forget(key)
        self.memory.copies.release()

    def finish(self) -> None:
        assert self.memory.host_bytes == 0, f"{self.memory.host_bytes} bytes were not fetched"
        self.memory.copies.release_all()


def kept_for(actions: Iterable[Action], simulation: Simulation) -> dict[Key, float]:
    """Returns how long a rank must keep each forward pass's activations until its backward pass."""
    return {
        (stage, number): simulation.starts[action] - simulation.ends[Action(stage, "F", number)]
        for action in actions
        for stage, kind, number in [action]
        if kind in ("I", "B")
    }


def longest_kept(kept: dict[Key, float]) -> list[Key]:
    """Returns the passes whose activations are kept for some time, the longest time first."""
    return sorted((key for key, time in kept.items() if time > 0), key=lambda key: -kept[key])


def hidden_by_link(
    kept: dict[Key, float], saved_bytes: dict[int, int], bandwidth: float, seconds: float
) -> set[Key]:
    """Returns the passes whose activations can be moved and fetched without delay in a step of ``seconds``.

    ``bandwidth`` is that of the link between device and host, in bytes per second.
    """
    away: set[Key] = set()
    busy = 0.0
    for key in longest_kept(kept):
        copying = 2 * saved_bytes.get(key[0], 0) / bandwidth
        if busy + copying > _LINK_SHARE * seconds:
            break
        if copying < kept[key]:
            away.add(key)
            busy += copying
    return away


def measured_bandwidth(memory: ActivationOffload, device: torch.device) -> float:
    """Measures bytes per second between device and host in the slower direction."""
    tensor = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)

    def seconds(copy: Any) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    host = memory.copies.to_host(tensor)
    out = statistics.median(seconds(lambda: memory.copies.to_host(tensor)) for _ in range(3))
    back = statistics.median(seconds(lambda: memory.copies.to_device(host)) for _ in range(3))
    memory.copies.release_all()
    return _PROBE_BYTES / max(out, back)
