# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which process it is: numbers of processes are used again, and containers have their own."""

import contextlib
import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDED = ("Z", "X")  # its parent has not asked for its status yet


def boot_id() -> str:
    """Returns what tells this start of this machine's kernel from all others; empty if unknown."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def pid_namespace() -> str:
    """Returns in which namespace the numbers of processes count; empty if unknown."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def start_time(pid: int) -> str:
    """Returns when a process started; empty if it has ended, or if that is unknown."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in _ENDED else fields[19]
    return ""
