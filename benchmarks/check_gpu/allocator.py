# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares the bytes of snapshots while training allocates and frees memory beside them.

A caching allocator that gave memory of a copy to training too early would show as bytes that
differ. The reference is computed on the CPU, from the number of the version alone.
"""

import random
from collections.abc import Iterator

import torch

from check_gpu.parts import Pushed, device_of, join_alone, make_pushed
from check_gpu.row import Row, Settings, judged

_NUM_SLOTS = 3


def run(settings: Settings) -> Iterator[Row]:
    """Yields one row, for all snapshots."""
    device = device_of(settings)
    rounds, scale = (60, 1024) if settings.on_gpu else (6, 32)
    join_alone()
    bases = _bases(scale)
    parameters = {name: base.to(device, copy=True) for name, base in bases.items()}
    pushed = make_pushed(parameters, device, _NUM_SLOTS)
    differing = 0
    for version in range(rounds):
        pushed.snapshots.fence()
        for parameter in parameters.values():
            parameter.add_(1.0)
        pushed.snapshots.copy_into(version % _NUM_SLOTS)
        _allocate_like_training(device, scale, version)
        if version > 0:  # read while the next copy is under way
            differing += _differing_bytes(pushed, bases, version - 1)
    differing += _differing_bytes(pushed, bases, rounds - 1)
    pushed.snapshots.close()
    figures = {
        "snapshots": float(rounds),
        "snapshot_bytes": float(pushed.plan.num_bytes),
        "differing_bytes": float(differing),
    }
    yield judged("snapshots under stress", differing == 0, "no byte differs", figures)


def _bases(scale: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(scale, scale), (scale * 4, scale), (7,), (scale, 3 * scale), (scale - 1, 5)]
    return {f"parameter{i}": torch.randn(shape) for i, shape in enumerate(shapes * 4)}


def _allocate_like_training(device: torch.device, scale: int, seed: int) -> None:
    """Writes into memory of many sizes on the current stream, and frees it in another order."""
    chooser, kept = random.Random(seed), []
    for _ in range(60):
        rows = chooser.randrange(1, 4 * scale)
        kept.append(torch.full((rows, scale), float("nan"), device=device, dtype=torch.bfloat16))
        if len(kept) > 8:
            kept.pop(chooser.randrange(len(kept)))


def _differing_bytes(pushed: Pushed, bases: dict[str, torch.Tensor], version: int) -> int:
    shards = pushed.snapshots.read(version % _NUM_SLOTS, 60.0)
    differing = 0
    for name, base in bases.items():
        value = base.clone()
        for _ in range(version + 1):  # rounded after each addition, as on the device
            value.add_(1.0)
        expected = value.to(torch.bfloat16).view(torch.uint8)
        differing += int((shards[name].contiguous().view(torch.uint8) != expected).sum())
    return differing
