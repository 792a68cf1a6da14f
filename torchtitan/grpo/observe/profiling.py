# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Torchtitan's profilers, around the training loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling

from torchtitan.grpo.job_config import JobConfig


@contextmanager
def profilers(config: JobConfig, step: int) -> Iterator[list[Any]]:
    """Runs the profilers that ``[profiling]`` enables; each needs ``step()`` after each step.

    Args:
        config: Configuration of the run.
        step: Number of steps that the run has taken so far.
    """
    settings = {"global_step": step, "base_folder": config.job.dump_folder}
    with (
        maybe_enable_profiling(config.profiling, **settings) as trace,
        maybe_enable_memory_snapshot(config.profiling, **settings) as snapshot,
    ):
        yield [profiler for profiler in (trace, snapshot) if profiler is not None]
