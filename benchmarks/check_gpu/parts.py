# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Parts of the product, put together for one process, and steps that resemble training."""

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from check_gpu.row import Settings
from torchtitan.grpo.models.shards import Assembly, Block, Piece
from torchtitan.grpo.weight_sync.plan import SourceLimits
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, SnapshotSlots, plan_push
from torchtitan.grpo.weight_sync.snapshot import Snapshots

_BUCKET_BYTES = 64 * 1024**2


class SameNames:
    """A state-dict adapter of a model whose parameters have the same names everywhere."""

    def to_hf(self, native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return native


@dataclass(frozen=True)
class Pushed:
    """The trainer's side of a push, up to the buckets in host memory."""

    plan: PushPlan
    slots: SnapshotSlots
    snapshots: Snapshots


def device_of(settings: Settings) -> torch.device:
    """Returns the first GPU, with its index as :func:`torch.cuda.set_device` demands, or the CPU."""
    return torch.device("cuda", 0) if settings.on_gpu else torch.device("cpu")


def wait_for_end_of_leaves(timeout_seconds: float) -> float:
    """Waits for the threads that leave weight groups, which go on when a leave has returned.

    Returns:
        The seconds that it took; more than ``timeout_seconds`` if they have not ended.
    """
    begin = time.monotonic()
    while any(thread.name.startswith("weight-leave-") for thread in threading.enumerate()):
        if time.monotonic() - begin > timeout_seconds:
            break
        time.sleep(0.01)
    return time.monotonic() - begin


def join_alone() -> None:
    """Makes the default process group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def make_pushed(
    parameters: Mapping[str, torch.Tensor], device: torch.device, num_slots: int
) -> Pushed:
    """Builds slots and snapshots as the trainer does; needs :func:`join_alone`."""
    on_gpu = device.type == "cuda"
    adapter: Any = SameNames()
    wholes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    assemblies = [
        Assembly(name, shape, (Piece(0, Block((0,) * len(shape), shape)),))
        for name, shape in wholes.items()
    ]
    limits = SourceLimits()
    plan = plan_push(assemblies, adapter, torch.bfloat16, _BUCKET_BYTES, limits, contiguous=on_gpu)
    slots = SnapshotSlots(plan, num_slots, pinned=on_gpu)
    return Pushed(plan, slots, Snapshots(parameters, slots.shards, device))


class Stopwatch:
    """Measures what is queued in a block: with events of the GPU, or with the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def __enter__(self) -> "Stopwatch":
        if self._on_gpu:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begin.record()
        self._host_begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.host_ms = (time.perf_counter() - self._host_begin) * 1e3
        if self._on_gpu:
            self._end.record()

    def wait_ms(self) -> float:
        """Waits until the GPU has done the block; returns its milliseconds."""
        if not self._on_gpu:
            return self.host_ms
        self._end.synchronize()
        return self._begin.elapsed_time(self._end)


def median_ms(call: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    """Returns the median milliseconds of a call, after two calls that are not measured."""
    times = []
    for number in range(rounds + 2):
        with Stopwatch(device) as watch:
            call()
        if number >= 2:
            times.append(watch.wait_ms())
        else:
            watch.wait_ms()
    return statistics.median(times)


def product_tflops(device: torch.device, size: int) -> float:
    """Returns the rate of a product of two square bfloat16 matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, device) / 1e9


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the norm of the difference to a float64 tensor on the CPU, by that tensor's norm."""
    difference = value.detach().cpu().double() - exact.detach()
    return float(difference.norm() / exact.detach().norm())


class TrainingSteps:
    """Matrix products with a backward pass and an update, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        dim, layers, tokens = (2048, 16, 16384) if device.type == "cuda" else (64, 2, 64)
        torch.manual_seed(0)
        self.parameters = {
            f"layers.{i}.weight": torch.randn(dim, dim, device=device) * dim**-0.5
            for i in range(layers)
        }
        self._input = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16)
        for weight in self.parameters.values():
            weight.requires_grad_()

    def backward(self) -> None:
        """Queues a forward and a backward pass, which allocate and free activations."""
        hidden = self._input
        for weight in self.parameters.values():
            hidden = torch.nn.functional.silu(hidden @ weight.to(torch.bfloat16)) + hidden
        hidden.float().square().mean().backward()

    def update(self) -> None:
        """Queues the change of the parameters."""
        with torch.no_grad():
            for weight in self.parameters.values():
                assert weight.grad is not None, "the backward pass comes first"
                weight.sub_(weight.grad, alpha=1e-6)
                weight.grad = None


def percentile(values: list[float], part: float) -> float:
    """Returns the smallest value that at least ``part`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]
