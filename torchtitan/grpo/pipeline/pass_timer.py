# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures the duration of a stage's passes without the time for which they wait for inputs."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from torchtitan.grpo.pipeline.tables.actions import Kind

Part = Kind | Literal["R"]
"""The kind of a pass, or R for the part of a backward pass that recomputes blocks."""


class PassTimer:
    """Collects times by stage and kind of pass; on a GPU by events, for which only results wait."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: dict[tuple[int, Part], list[tuple[Any, Any]]] = defaultdict(list)
        self._exchanges: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self, stage: int, kind: Part) -> Iterator[None]:
        begin = self._mark()
        yield
        self._marks[stage, kind].append((begin, self._mark()))

    @contextmanager
    def measure_round_trip(self) -> Iterator[None]:
        begin = self._mark()
        yield
        self._exchanges.append((begin, self._mark()))

    def median_hop(self) -> float | None:
        """One-way time in seconds, or None if no exchange was measured."""
        if not self._exchanges:
            return None
        return statistics.median(self._seconds(*marks) for marks in self._exchanges) / 2

    def medians(self) -> dict[tuple[int, Part], float]:
        """Returns seconds by stage and kind. I and B do not include R."""
        return {
            key: statistics.median(self._seconds(*marks) for marks in every)
            for key, every in self._marks.items()
        }

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if not self._is_cuda:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000
