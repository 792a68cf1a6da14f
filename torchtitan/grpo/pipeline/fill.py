# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs units of other work where a pipeline rank is idle (PipeFill, https://arxiv.org/abs/2410.07192).

A rank waits for another rank's tensor before some of its passes. A simulation of the table, with
measured times of the passes, predicts how long. Units run in this time, on the stream of the passes,
as long as a unit's usual time fits. The host decides by this plan, because it runs ahead of a GPU
and cannot see what arrives. If a pass still waits after the units before it, the real idle time is
known. From then on, the shorter of the real and the simulated time is used.
"""

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from torchtitan.grpo.pipeline.pass_timer import DeviceClock
from torchtitan.grpo.pipeline.tables.actions import Costs, Table
from torchtitan.grpo.pipeline.tables.gaps import idle_before
from torchtitan.grpo.pipeline.tables.simulate import Simulation, simulate

_LATEST_UNITS = 32
"""Number of units over which a job's times are averaged."""


@dataclass(frozen=True)
class UnitTimes:
    """What one unit or several together usually take, in seconds.

    Attributes:
        mean: Mean of the time.
        variance: Variance of the time from unit to unit.
        error: Standard error of the mean. It is common to a job's units, so it adds up over them.
    """

    mean: float = 0.0
    variance: float = 0.0
    error: float = 0.0

    @property
    def usually_at_most(self) -> float:
        """Mean plus standard deviation."""
        return self.mean + math.sqrt(self.variance + self.error**2)

    def __add__(self, other: "UnitTimes") -> "UnitTimes":
        return UnitTimes(
            self.mean + other.mean, self.variance + other.variance, self.error + other.error
        )


class FillJob(ABC):
    """Work that is cut into units, which run on one rank between two passes of its training.

    A unit must not communicate with training ranks, because they do not run the unit at the same
    time. A job that ``is_lost`` is not run again.

    Attributes:
        usual: Time of a unit, from the latest ones; None before one was measured.
        num_bytes: Device memory that a unit has needed while it ran; 0 on CPU.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_lost = False
        self.num_bytes = 0
        self.usual: UnitTimes | None = None
        self._latest: deque[float] = deque(maxlen=_LATEST_UNITS)

    def add_time(self, seconds: float) -> None:
        """Adds the measured time of a unit.

        A time more than twice as long as any other does not count. Otherwise, one disturbed unit
        could keep further units from running, and so from being measured.
        """
        self._latest.append(seconds)
        *others, longest = sorted(self._latest)
        times = others if others and longest > 2 * others[-1] else [*others, longest]
        mean = statistics.fmean(times)
        # A single time tells nothing of how far others differ.
        variance = statistics.pvariance(times, mean) + (mean / len(times)) ** 2
        self.usual = UnitTimes(mean, variance, math.sqrt(variance / len(times)))

    def begin_step(self, step: int) -> None:  # noqa: B027  (few jobs need it)
        """Called before the passes of a step."""

    @abstractmethod
    def run(self) -> bool:
        """Runs a unit on the current stream; False if there is none in this step, or if it is lost."""

    def close(self) -> None:  # noqa: B027  (few jobs need it)
        """Called when the training has ended."""


_WARM_UP, _TRIES = 2, 4
"""Number of a job's first units that are not measured, and of those that are, both before passes."""
_LONGEST_TRIES_SECONDS = 1.0
"""Time after which no further unit of a job runs before a pass."""
_MARGIN = 0.05
"""Share of each idle time that stays free."""
_LEAST_SECONDS = 1e-4
"""Shorter idle times are not looked at."""
_WAITED_SECONDS = 2e-4
"""A pass that has waited for less did not wait: its input had arrived."""
_SHRINKS = 0.8
"""What is taken for the length of an idle time that was filled too far, relative to before."""


@dataclass
class Gap:
    """An idle time of this rank in a table, in seconds: as simulated, and as observed (``shown``)."""

    simulated: float = 0.0
    shown: float | None = None

    @property
    def seconds(self) -> float:
        return self.simulated if self.shown is None else min(self.simulated, self.shown)

    def learn(self, filled: float, waited: float) -> float:
        """Corrects the gap from the time that units filled and the time that the pass still waited.

        Returns by how much the units delayed the pass. If the pass did not wait, its input came at an
        unknown time before the units ended. It is assumed to have come when expected if the units took
        longer than the gap, or else earlier. Either way, the gap is assumed to be shorter from now on.
        """
        if waited > _WAITED_SECONDS:
            found, late = filled + waited, 0.0
        else:
            found = _SHRINKS * min(filled, self.seconds)
            late = filled - (self.seconds if filled > self.seconds else found)
        self.shown = found if self.shown is None else (self.shown + found) / 2
        return late


@dataclass
class FillFigures:
    """How much idle time one rank has filled.

    ``late_seconds`` is by how much units of jobs delayed training. This includes the whole time of
    units that ran before a training pass to be measured.
    """

    units: float = 0.0
    seconds: float = 0.0
    usable_seconds: float = 0.0
    late_seconds: float = 0.0


class GapFiller:
    """Runs units of ``jobs``, earlier jobs first, between the passes of one rank.

    A few units of each job run before the first training passes: the first ones may load or compile
    something, and the others show how long a unit takes. Later, one unit of each job is measured
    before each training pass that is timed.
    """

    def __init__(
        self, jobs: Sequence[FillJob], device: torch.device, clock: DeviceClock | None = None
    ) -> None:
        self.jobs = jobs
        self.figures = FillFigures()
        self._clock = clock or DeviceClock(device)
        self._memory = DeviceMemory(device)
        self._ready = list(jobs)
        self._warm: set[FillJob] = set()
        self._num_passes = 0
        self._costs: dict[int, Costs] = {}
        self._gaps: dict[int, list[Gap]] = {}
        self._simulated: set[int] = set()
        self._running: Iterator[Gap] | None = None
        self._filled: tuple[Gap, Any, Any] | None = None
        self._unsettled: deque[tuple[Any, Callable[[], None]]] = deque()

    @property
    def measures(self) -> bool:
        """Whether the pipeline's passes are timed in this training pass, which becomes rarer over time."""
        count = self._num_passes
        return count > 1 and (count % 64 == 0 if count > 64 else count & (count - 1) == 0)

    def begin_step(self, step: int) -> None:
        self._ready = [job for job in self.jobs if not job.is_lost]
        for job in self._ready:
            job.begin_step(step)

    def begin(self, table: Table, _assumed: Simulation, rank: int) -> None:
        """Begins a training pass with this table, which must be the same object each time."""
        self._num_passes += 1
        self._memory.begin_pass()
        self._settle()
        for job in list(self._ready):
            number = int(self.measures) if job.usual is not None else _TRIES
            if not (is_warm := job in self._warm):
                number = _WARM_UP
            began = time.perf_counter()
            for _ in range(number):
                if not self._try(job, is_measured=is_warm):
                    break
                self._warm.add(job)
                # The other ranks wait. A unit that takes so long fits into no gap.
                if time.perf_counter() - began > _LONGEST_TRIES_SECONDS:
                    break
        self._running = None
        costs = self._costs.get(table.num_stages)
        if costs is not None and not self.measures:
            self._running = iter(self._planned(table, rank, costs))

    def learn(self, costs: Costs) -> None:
        """Uses the costs of a timed training pass, of one model or of two, for planning from now on."""
        self._costs[len(costs.stages)] = costs
        self._simulated.clear()

    def fill(self) -> None:
        """Runs units before a pass. Called before each pass of the table, in the table's order."""
        gap = None if self._running is None else next(self._running)
        if gap is None or gap.simulated < _LEAST_SECONDS:
            return
        self.figures.usable_seconds += gap.simulated
        begin = self._clock.mark()
        self._run_units(begin, (1 - _MARGIN) * gap.seconds)
        self._filled = gap, begin, self._clock.mark()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context that measures how long a pass, after :meth:`fill`, waits for its input."""
        filled, self._filled = self._filled, None
        if filled is None:
            yield
            return
        begin = self._clock.mark()
        yield
        end = self._clock.mark()
        self._unsettled.append((end, partial(self._learn_gap, *filled, begin, end)))

    def finish(self) -> None:
        """Ends a training pass."""
        assert self._running is None or next(self._running, None) is None, (
            "a pass of the table was not announced to the gap filler"
        )
        self._running = None

    def take_figures(self) -> FillFigures:
        """Returns figures of the units that the device has run since the last call."""
        self._settle()
        figures, self.figures = self.figures, FillFigures()
        return figures

    def close(self) -> None:
        for job in self.jobs:
            job.close()

    def _planned(self, table: Table, rank: int, costs: Costs) -> list[Gap]:
        gaps = self._gaps.setdefault(id(table), [Gap() for _ in table.actions[rank]])
        if id(table) not in self._simulated:
            self._simulated.add(id(table))
            idle = idle_before(table, simulate(table, costs), rank)
            for gap, seconds in zip(gaps, idle, strict=True):
                gap.simulated = seconds
        return gaps

    def _try(self, job: FillJob, *, is_measured: bool) -> bool:
        """Runs a unit outside of any gap, alone on the device. Returns False if there was none."""
        begin = self._clock.mark()
        with record_function(f"fill {job.name}"), self._memory.measured(job, is_alone=True):
            has_run = job.run()
        if not has_run:
            self._ready.remove(job)
            return False
        end = self._clock.mark()
        self._unsettled.append((end, partial(self._add_try, job, begin, end, is_measured)))
        self._settle()
        return True

    def _run_units(self, begin: Any, budget: float) -> None:
        host_begin = time.perf_counter()
        used = UnitTimes()
        while (job := self._fitting(budget, used)) is not None:
            unit_begin = self._clock.mark()
            usual = job.usual or UnitTimes()
            with record_function(f"fill {job.name}"), self._memory.measured(job):
                has_run = job.run()
            if has_run:
                end = self._clock.mark()
                self._unsettled.append((end, partial(self._add_unit, job, unit_begin, end)))
                if self._clock.is_past(end):
                    used = UnitTimes(self._clock.seconds(begin, end))
                else:
                    used += usual
            else:
                self._ready.remove(job)
            used = replace(used, mean=max(used.mean, time.perf_counter() - host_begin))
            self._settle()

    def _fitting(self, budget: float, used: UnitTimes) -> FillJob | None:
        """Returns a job whose unit fits into what ``used`` leaves of ``budget`` seconds, or None."""
        for job in self._ready:
            fits = job.usual is not None and (used + job.usual).usually_at_most <= budget
            if fits and self._memory.fits(job):
                return job
        return None

    def _settle(self) -> None:
        """Reads the times of units and waits that the device has completed."""
        while self._unsettled and self._clock.is_past(self._unsettled[0][0]):
            self._unsettled.popleft()[1]()

    def _add_try(self, job: FillJob, begin: Any, end: Any, is_measured: bool) -> None:
        seconds = self._clock.seconds(begin, end)
        self.figures.late_seconds += seconds
        if is_measured:
            job.add_time(seconds)

    def _add_unit(self, job: FillJob, begin: Any, end: Any) -> None:
        seconds = self._clock.seconds(begin, end)
        self.figures.units += 1
        self.figures.seconds += seconds
        job.add_time(seconds)

    def _learn_gap(self, gap: Gap, begin: Any, filled: Any, waits: Any, arrived: Any) -> None:
        late = gap.learn(self._clock.seconds(begin, filled), self._clock.seconds(waits, arrived))
        self.figures.late_seconds += late


_KEPT_FREE = 0.05
"""Share of the device's memory that units leave free, since memory is cut into pieces."""


class DeviceMemory:
    """Measures what units need of a GPU's memory, and what is left. On CPU everything fits."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._limit = 0.0

    def begin_pass(self) -> None:
        if self._is_cuda:
            free, _ = torch.cuda.mem_get_info(self._device)
            self._limit = (1 - _KEPT_FREE) * (free + torch.cuda.memory_reserved(self._device))

    def fits(self, job: FillJob) -> bool:
        if not self._is_cuda:
            return True
        return torch.cuda.memory_allocated(self._device) + job.num_bytes <= self._limit

    @contextmanager
    def measured(self, job: FillJob, *, is_alone: bool = False) -> Iterator[None]:
        """Context that raises a job's ``num_bytes`` to the memory that the unit in the context needs.

        ``is_alone`` resets the peak of memory. Between passes it is not reset, because it is also the
        passes' peak. A unit that does not raise the peak needs no more than the passes, and is ignored.
        """
        if not self._is_cuda:
            yield
            return
        if is_alone:
            torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_stats(self._device)
        yield
        peak = torch.cuda.max_memory_allocated(self._device)
        if is_alone or peak > before["allocated_bytes.all.peak"]:
            needed = peak - before["allocated_bytes.all.current"]
            job.num_bytes = max(job.num_bytes, needed)
