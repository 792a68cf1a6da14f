# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A user's function as work for the idle time of a pipeline (docs/how-to/fill-the-gaps.md).

The function is called as ``job(context)`` and returns an iterator, as a generator does. Each
``next()`` on the iterator runs a unit. When the iterator ends, the function is called again in the next step.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.pipeline.fill import FillJob
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.system.functions import describe_error, load_function, user_line
from torchtitan.grpo.system.logs import logger

KEY = "parallelism.pipeline_fill_jobs"


@dataclass
class FillContext:
    """What a job is told; ``step`` is always the step that is being trained.

    Attributes:
        device: Where the job may compute, on the current stream.
        rank: This rank's number among the ``num_ranks`` training ranks. A job runs on each rank by itself.
        pipeline_rank: This rank's number among the ``num_pipeline_ranks`` ranks of its pipeline.
        dump_folder: The folder of the run.
    """

    device: torch.device
    rank: int
    num_ranks: int
    pipeline_rank: int
    num_pipeline_ranks: int
    dump_folder: Path
    step: int = 0


JobFunction = Callable[[FillContext], Iterator[Any]]


def load_job(path: str) -> JobFunction:
    """Returns the function that a path names. Raises ValueError if the function cannot be a job."""
    function = load_function(path, f"{KEY}:", ())
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(
            f"{KEY}: {path!r} must take one argument, the context of the job, but {error}. Define it "
            "as def job(context), with a yield after each unit of work."
        ) from error
    except ValueError:
        pass  # a callable that does not tell its signature
    return function


def load_jobs(paths: Sequence[str], stage: LeanStage, dump_folder: str) -> list[FillJob]:
    """Loads the jobs that ``paths`` name, for the rank that holds ``stage``."""
    context = FillContext(
        device=stage.device,
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        pipeline_rank=stage.group_rank,
        num_pipeline_ranks=stage.group_size,
        dump_folder=Path(dump_folder),
    )
    return [UserJob(path, load_job(path), context) for path in paths]


_LONGEST_UNIT_SECONDS = 60.0
"""After this time a unit hangs. It must be shorter than the other ranks wait for this one."""
_LONGEST_START_SECONDS = 240.0
"""The same for the first unit, which may load a model; in the first step ranks wait longer."""


class UserJob(FillJob):
    """Runs the units of a user's function. If one fails or hangs, the job is lost, with a warning."""

    def __init__(self, name: str, function: JobFunction, context: FillContext) -> None:
        super().__init__(name)
        self._function, self._context = function, context
        self._units: Iterator[Any] | None = None
        self._has_run = False
        self._random = _RandomNumbers(context.device)
        self._thread = _OwnThread(f"fill-{name}", context.device)

    def begin_step(self, step: int) -> None:
        self._context.step = step

    def run(self) -> bool:
        limit = _LONGEST_UNIT_SECONDS if self._has_run else _LONGEST_START_SECONDS
        self._has_run = True
        try:
            with self._random.used():
                return self._thread.call(self._run_unit, limit)
        except Empty:
            reason = f"did not end a unit within {limit:g} s"
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            reason = f"failed with {describe_error(error)}{user_line(error, self._function)}"
        self.is_lost = True
        logger.warning(
            f"{KEY}: {self.name!r} {reason}, on rank {self._context.rank} in step "
            f"{self._context.step}. This rank trains on without it (pipeline/fill_lost_jobs)."
        )
        return False

    def close(self) -> None:
        # A generator that waits at a ``yield`` leaves its contexts, on the thread that runs it.
        self._thread.close(getattr(self._units, "close", lambda: None))

    def _run_unit(self) -> bool:
        if self._units is None:
            self._units = iter(self._function(self._context))
        try:
            next(self._units)
        except StopIteration:
            self._units = None
            return False
        return True


class _RandomNumbers:
    """A job's own state of torch's random generators, kept apart from that of the training."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._own: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        others = self._get()
        if self._own is not None:
            self._set(*self._own)
        try:
            yield
        finally:
            self._own = self._get()
            self._set(*others)

    def _get(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        of_device = None if self._device is None else torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state(), of_device

    def _set(self, of_host: torch.Tensor, of_device: torch.Tensor | None) -> None:
        torch.set_rng_state(of_host)
        if self._device is not None and of_device is not None:
            torch.cuda.set_rng_state(of_device, self._device)


class _OwnThread:
    """Runs calls on one thread, while the caller waits.

    Torch's state of a thread (gradients on or off, autocast, the default device) stays apart from
    that of the training, even if a generator yields inside of a context. The stream is the caller's.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # A unit that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(stream,), name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any], timeout_seconds: float) -> Any:
        """Returns the function's result or raises its exception. Raises ``queue.Empty`` on a timeout."""
        self._calls.put(function)
        result, error = self._results.get(timeout=timeout_seconds)
        if error is not None:
            raise error
        return result

    def close(self, last: Callable[[], Any], timeout_seconds: float = 5.0) -> None:
        self._calls.put(last)
        self._calls.put(None)
        self._thread.join(timeout_seconds)

    def _run(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
        while (function := self._calls.get()) is not None:
            try:
                self._results.put((function(), None))
            except BaseException as error:
                self._results.put((None, error))
