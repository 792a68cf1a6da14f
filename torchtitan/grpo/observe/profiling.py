# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A clock for a step and its parts, and the profilers that the table ``[profiling]`` configures."""

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.config.frame import Profiling
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.system.logs import logger


class StepClock:
    """Measures the seconds of each step and of its parts. A step begins where the previous one ended."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._begin = self._last_end = time.perf_counter()

    def restart(self) -> None:
        """Begins a step now, so that the time since the last one, such as of an evaluation, is not counted."""
        self._last_end = time.perf_counter()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - begin

    def end_step(self) -> dict[str, float]:
        now = time.perf_counter()
        step_seconds = now - self._last_end
        times = {f"time/{part}_seconds": seconds for part, seconds in self._parts.items()}
        times["time/step_seconds"] = step_seconds
        times["time/elapsed_seconds"] = now - self._begin
        waited = self._parts.get("wait_data", 0.0)
        times["time/wait_data_fraction"] = min(waited / step_seconds, 1.0)
        self._parts.clear()
        self._last_end = now
        return times


_RECORDED = (torch.profiler.ProfilerAction.RECORD, torch.profiler.ProfilerAction.RECORD_AND_SAVE)


@contextmanager
def profilers(config: JobConfig, step: int) -> Iterator[list[Any]]:
    """Runs and yields the profilers that ``[profiling]`` enables. Call each one's ``step()`` after each step."""
    settings = _within(config.profiling, step, config.training.steps)
    folder = config.job.dump_folder
    with ExitStack() as stack:
        running: list[Any] = []
        if settings.enable_profiling:
            traces = Path(folder, settings.save_traces_folder)
            running.append(stack.enter_context(_trace(settings, step, traces)))
        if settings.enable_memory_snapshot:
            snapshots = Path(folder, settings.save_memory_snapshot_folder)
            running.append(stack.enter_context(_MemorySnapshots(settings, step, snapshots)))
        yield running


_SNAPSHOT_ENTRIES = 100_000


class _MemorySnapshots:
    """Records GPU memory allocations. Writes them every ``profile_freq`` steps and when memory runs out."""

    def __init__(self, settings: Profiling, step: int, folder: Path) -> None:
        self._freq, self._step, self._folder = settings.profile_freq, step, folder

    def __enter__(self) -> "_MemorySnapshots":
        torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
        return self

    def step(self) -> None:
        self._step += 1
        if self._step % self._freq == 0:
            self._write(f"iteration_{self._step}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            self._write(f"iteration_{self._step}_exit")
        torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, name: str) -> None:
        file = self._folder / name / f"rank{dist.get_rank()}_memory_snapshot.pickle"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
        logger.info(f"The GPU's memory is in {file}: show it on https://pytorch.org/memory_viz.")


def _within(settings: Profiling, step: int, last: int) -> Profiling:
    """Returns settings with which the last step is profiled if the run ends before the next profile is due."""
    if last // settings.profile_freq > step // settings.profile_freq:
        return settings
    active = min(settings.profiler_active, last)
    warmup = min(settings.profiler_warmup, last - active)
    return replace(settings, profile_freq=last, profiler_active=active, profiler_warmup=warmup)


def _trace(settings: Profiling, first: int, folder: Path) -> torch.profiler.profile:
    """Returns a profiler of CPU and GPU. It works without a GPU, unlike upstream's."""
    action = torch.profiler.schedule(
        wait=settings.profile_freq - settings.profiler_warmup - settings.profiler_active,
        warmup=settings.profiler_warmup,
        active=settings.profiler_active,
    )

    written: set[int] = set()

    def write(profiler: torch.profiler.profile) -> None:
        step = first + profiler.step_num
        has_steps = profiler.step_num > 0 and action(step - 1) in _RECORDED
        if step in written or not has_steps:  # called once more at the end of the run
            return
        written.add(step)
        file = folder / f"iteration_{step}" / f"rank{dist.get_rank()}_trace.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            logger.error(f"The trace {file} cannot be written ({error}). Training goes on.")

    # The warning is for readers of events from the profiler instead of from the files.
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
    return torch.profiler.profile(
        schedule=lambda taken: action(first + taken), on_trace_ready=write, record_shapes=True
    )
