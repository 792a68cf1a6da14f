# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures, on the device's clock, what the time of a step's passes was spent on."""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from torchtitan.grpo.pipeline.pass_timer import DeviceClock, Part, PassTimer
from torchtitan.grpo.system import spans

_NOTHING = nullcontext()


@dataclass
class PassTimes:
    """Seconds of a rank's passes.

    Attributes:
        parts: Seconds of ``forward``, ``backward`` and ``optimizer`` (clipping), with the waits in them.
        own: Seconds of this rank's own work in a part of the passes that is the same on all ranks. In a
            pipeline, of all its passes; otherwise of the blocks and the loss of the first microbatch of
            each optimizer step. Waits for collectives between blocks are not part of it.
        pipeline: Seconds of the pipeline's passes, from the first to the last; 0 without a pipeline.
    """

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    own: float = 0.0
    pipeline: float = 0.0

    def add(self, other: "PassTimes") -> None:
        for part, seconds in other.parts.items():
            self.parts[part] += seconds
        self.own += other.own
        self.pipeline += other.pipeline

    def divided(self, own: Sequence[float]) -> dict[str, float]:
        """Returns the seconds of each part, and of waits for other ranks, as a mean over ranks.

        ``own`` are the ranks' own seconds. Ranks are in step with each other, so each takes as long as the
        one with the most work. The ranks of a pipeline also wait if all have equal work.
        """
        passes = {part: self.parts[part] for part in ("forward", "backward")}
        total = self.pipeline or sum(passes.values())
        longest = max(*own, self.pipeline)
        waited = 1.0 - sum(own) / len(own) / longest if longest > 0 and sum(own) > 0 else 0.0
        measured = sum(passes.values())
        scale = (1.0 - waited) * total / measured if measured > 0 else 0.0
        parts = {part: scale * seconds for part, seconds in passes.items()}
        return parts | {"ranks": waited * total, "optimizer": self.parts["optimizer"]}


class PassMarks:
    """Marks the moments at which parts of the passes begin. Only reading the times waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._marks: list[tuple[str, Any]] = []
        self._own: list[tuple[str, Any, Any]] = []
        self._begun: Any = None
        self._is_watching = False

    def mark(self, part: str) -> None:
        """The ``part`` begins now, and the former one ends; an empty name is not counted."""
        self._marks.append((part, self._clock.mark()))

    @contextmanager
    def own(self, part: str) -> Iterator[None]:
        """Counts the context as own work, in a pipeline also as a ``part`` of the passes."""
        begin = self._clock.mark()
        yield
        self._own.append((part, begin, self._clock.mark()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def watch(self, blocks: Iterable[nn.Module]) -> None:
        """Counts the forward passes of ``blocks`` as own work inside :meth:`watching`.

        Call it after FSDP2 is applied, whose waits for parameters then lie outside.
        """

        def begin(*_: Any) -> None:
            if self._is_watching:
                self._begun = self._clock.mark()

        def end(*_: Any) -> None:
            if self._begun is not None:
                self._own.append(("", self._begun, self._clock.mark()))
                self._begun = None

        for block in blocks:
            block.register_forward_pre_hook(begin)
            block.register_forward_hook(end, prepend=True)

    def forget(self) -> None:
        """Drops the marks of passes that are no part of a step, such as those of an evaluation."""
        self._marks, self._own = [], []

    def take(self) -> PassTimes:
        """Returns the times since the last call. The host waits until the device has reached the last mark."""
        marks, own = self._marks, self._own
        self._marks, self._own = [], []
        times = PassTimes()
        for (part, begin), (_, end) in itertools.pairwise(marks):
            if part == "pipeline":
                times.pipeline += self._clock.seconds(begin, end)
            elif part:
                times.parts[part] += self._clock.seconds(begin, end)
        if spans.is_on() and marks:
            self._tell(marks)
        for part, begin, end in own:
            seconds = self._clock.seconds(begin, end)
            times.own += seconds
            if part:
                times.parts[part] += seconds
        return times

    def _tell(self, marks: Sequence[tuple[str, Any]]) -> None:
        """Records spans of the parts. On a GPU, which the host has just waited for, the last one ends now."""
        last = marks[-1][1]
        end_of_all = last if isinstance(last, float) else time.monotonic()
        for (part, begin), (_, end) in itertools.pairwise(marks):
            if part:
                first, second = (end_of_all - self._clock.seconds(at, last) for at in (begin, end))
                spans.add("device", part, first, second)


def compared(own: Sequence[float]) -> dict[str, float]:
    """Returns metrics of the ranks' own work: which rank is the slowest, and by how much."""
    typical = statistics.median(own)
    if len(own) < 2 or typical <= 0:
        return {}
    slowest = max(range(len(own)), key=own.__getitem__)
    return {"ranks/slowest": float(slowest), "ranks/slowest_factor": own[slowest] / typical}


@contextmanager
def timed(
    stage: int, kind: Part, microbatch: int, timer: PassTimer | None, marks: PassMarks | None
) -> Iterator[None]:
    """Context of a pass, which a timer, the marks and the timeline measure where they are on."""
    own = _NOTHING if marks is None else marks.own("forward" if kind == "F" else "backward")
    measuring = _NOTHING if timer is None else timer.measure(stage, kind)
    with spans.span("pipeline", kind, stage=stage, microbatch=microbatch), measuring, own:
        yield
