# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures the duration of a stage's passes without the time for which they wait for inputs."""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from torchtitan.grpo.pipeline.tables.actions import Costs, Kind, StageCosts

Part = Kind | Literal["R", "H"]
"""The kind of a pass; R is the part of a backward pass that recomputes blocks, and H, with a rank
in place of the stage, the way of a tensor to the next rank and back."""


class DeviceClock:
    """Takes timestamps on a device. On a GPU these are events, since the host runs ahead of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        """Returns whether the device has reached a mark. Never waits."""
        return not self._is_cuda or mark.query()

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the time between two marks; the host waits until the device has reached them."""
        if not self._is_cuda:
            return end - begin
        if not end.query():
            end.synchronize()
        return begin.elapsed_time(end) / 1000


class PassTimer:
    """Collects times by stage and part. On a GPU, only reading the results waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._marks: dict[tuple[int, Part], list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def measure(self, stage: int, part: Part) -> Iterator[None]:
        begin = self._clock.mark()
        yield
        self._marks[stage, part].append((begin, self._clock.mark()))

    def medians(self) -> dict[tuple[int, Part], float]:
        """Returns median seconds by stage and part. Backward parts, I and B, exclude R, the recomputation."""
        return {
            key: statistics.median(self._clock.seconds(*marks) for marks in every)
            for key, every in self._marks.items()
        }


def average_costs(
    timer: PassTimer,
    stages: Iterable[int],
    memory: float,
    group: dist.ProcessGroup | None = None,
) -> Costs:
    """Averages the times of stages and of a hop over the ranks of ``group`` (None: all). Collective.

    A schedule needs the same costs on all ranks, because FSDP's collectives connect the pipelines.
    ``memory`` is the memory of a microbatch's activations in one stage.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, timer.medians(), group=group)
    found: dict[tuple[int, Part], list[float]] = defaultdict(list)
    for (stage, part), seconds in itertools.chain.from_iterable(m.items() for m in of_ranks):
        found[stage, part].append(seconds)

    def costs(stage: int) -> StageCosts:
        measured = {part for part in ("F", "I", "W", "B") if found[stage, part]}
        assert "F" in measured and ("B" in measured or {"I", "W"} <= measured), (stage, measured)
        forward, recompute, rest, weight_grad, both = (
            statistics.fmean(found[stage, part] or [0.0]) for part in ("F", "R", "I", "W", "B")
        )
        return StageCosts(
            forward, recompute + rest, weight_grad,
            full_backward=recompute + both if both else None,
            activation=memory, pending=memory, recompute=recompute,
        )  # fmt: skip

    averages = tuple(costs(stage) for stage in stages)
    trips = [seconds for (_, part), times in found.items() if part == "H" for seconds in times]
    return Costs(averages, hop=statistics.fmean(trips or [0.0]) / 2)
