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
    """Names of additional environment variables that are passed to the workers, such as
    ``OPENAI_API_KEY``. A name that ends in * stands for all variables that begin with the rest of
    the name. By default, a worker sees paths, the locale, numbers of threads and the location of
    Hugging Face's cache, but no key or token of the trainer's environment."""

    max_memory_gib: Annotated[float, above(0).or_value(0, "no limit")] = 0.0
    """Maximum address space of one worker, in GiB (RLIMIT_AS). Beyond it, Python raises MemoryError
    in the user's code. Reserved address space counts as well, so a worker that imports torch needs
    several GiB."""

    max_cpu_seconds: Annotated[int, at_least(1).or_value(0, "no limit")] = 0
    """Maximum total CPU time of one worker, in seconds (RLIMIT_CPU). A worker that exceeds it is
    killed, the completions that it was scoring count as failed, and another worker takes its
    place."""
