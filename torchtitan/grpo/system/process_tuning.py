# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Priority, memory, files and garbage collection of processes with event loops that run for weeks."""

import contextlib
import ctypes
import gc
import logging
import os
import sys

from torchtitan.grpo.system.connections import raise_file_limit
from torchtitan.grpo.system.errors import RunError

logger = logging.getLogger(__name__)

_NICE = 5
# Python's default is 5 ms: a busy thread keeps the interpreter that long from one that waits.
_SWITCH_SECONDS = 0.0005
_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h
# Size of the blocks into which asyncio receives (`max_size` of its socket transports).
_RECEIVED_BYTES = 256 << 10
_LEAST_FILES, _FILES_OF_RUN = 1024, 4096


def yield_to_training() -> None:
    """Lowers the priority of the calling thread, and of every thread that it starts.

    These threads also become batch threads, which do not preempt the thread that wakes them up. Both work
    only on Linux. In addition, all threads of the process release Python's interpreter lock sooner.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def map_large_blocks() -> None:
    """Keeps asyncio's receive buffers out of glibc's heap, which would otherwise grow for days.

    asyncio receives into a block of 256 KiB and shrinks it to the data. Long-lived small blocks then scatter
    over the freed rest. By default, glibc maps large blocks separately, but raises its threshold for "large"
    whenever it frees a larger one. This function fixes the threshold. Mapping costs a system call and page
    faults, so a process that computes with large arrays should not call this function.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library, such as musl
        return
    if mallopt(_M_MMAP_THRESHOLD, _RECEIVED_BYTES) == 0:
        logger.info("The C library refuses M_MMAP_THRESHOLD; memory may grow slowly.")


def return_free_memory() -> None:
    """Gives the pages of glibc's heap that hold nothing back to the system, as far as it can."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # another C library, such as musl
        ctypes.CDLL(None).malloc_trim(0)


def spare_collections() -> None:
    """Makes the garbage collector block the event loop more rarely and for a shorter time.

    Existing objects live as long as the process, so they are excluded from collections. A thousand
    completions in flight add about 150 objects each, so full collections are made ten times rarer: one in
    two minutes. Reference cycles must therefore be rare. asyncio leaves one per closed connection
    (see `IDLE_SECONDS`).
    """
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 10 * old)


def require_open_files() -> None:
    """Raises the limit of open files, which child processes inherit. If it stays too low, raises RunError."""
    if (limit := raise_file_limit(_FILES_OF_RUN)) < _LEAST_FILES:
        raise RunError(
            f"A run must be allowed to open {_LEAST_FILES} files at once, for its connections, got "
            f"{limit}, the hard limit (ulimit -Hn), which this shell cannot raise. Start a new shell, or have it "
            "raised where it is set (/etc/security/limits.conf, LimitNOFILE, docker run --ulimit nofile=4096)."
        )
