# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How much host memory this process may still take."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Returns how many bytes are free on the host and within the limit of the container.

    Files that the kernel has cached count as free.

    Args:
        cgroup: Folder of the container's limits (cgroup v2).
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stats = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return free  # no limit, or no cgroup v2
    if limit == "max":
        return free
    return min(free, max(int(limit) - used + int(stats.get("inactive_file", 0)), 0))
