# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[workers]`` table: the processes that run reward functions and environments."""

from dataclasses import dataclass, field
from typing import Annotated

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class Workers:
    """``[workers]``: the processes that run reward functions and environments."""

    pass_variables: list[str] = field(default_factory=list)
    """Names of further environment variables that the workers see, such as ``OPENAI_API_KEY``. A name
    that ends in * stands for all that begin so. Without them a worker sees paths, the locale,
    numbers of threads and where Hugging Face's cache is, but no key or token of the trainer's
    environment."""

    max_memory_gib: Annotated[float, above(0).or_value(0, "no limit")] = 0.0
    """Largest address space of one worker, in GiB (RLIMIT_AS). Beyond it Python raises MemoryError in
    the user's code. It counts what is reserved, so that a worker that imports torch needs several
    GiB."""

    max_cpu_seconds: Annotated[int, at_least(1).or_value(0, "no limit")] = 0
    """Processor time that one worker may use in all, in seconds (RLIMIT_CPU). A worker that exceeds it
    is ended, what it was scoring counts as failed, and another takes its place."""
