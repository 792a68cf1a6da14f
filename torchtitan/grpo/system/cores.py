# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How processes that compute on CPUs share the cores of a machine."""

import os
import sys
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def share_cores(num_processes: int) -> None:
    """Sets environment variables for ``num_processes`` about to be started, each with its share of threads.

    Other child processes, such as inference servers, inherit the same number. There may be more threads
    than cores, so threads sleep while they wait for each other. Variables that are already set are kept.
    Where there is a GPU, nothing is set.
    """
    import torch  # not every process that counts cores needs it

    if not torch.cuda.is_available():
        threads = max(1, min(torch.get_num_threads(), _quota()) // num_processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def usable_cores() -> int:
    """The number of cores that this process may keep busy."""
    return min(os.cpu_count() or 1, _quota())


def _quota(file: Path = _QUOTA) -> int:
    """Returns how many cores the container may keep busy (cgroup v2), at least 1."""
    try:
        microseconds, period = file.read_text().split()
        return max(1, int(microseconds) // int(period))
    except (OSError, ValueError):
        return sys.maxsize  # no limit, or no cgroup v2
