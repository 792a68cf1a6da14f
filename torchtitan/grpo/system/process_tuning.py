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

    A thread for batch work does not preempt the one that wakes it up. Only Linux follows these
    hints. All threads also release the interpreter sooner.
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

    asyncio receives into 256 KiB and shrinks the block; small blocks that live longer scatter over
    the freed rest. glibc would map large blocks separately, but raises this threshold as it frees
    larger ones. Mapping costs a system call and page faults: a process that computes with large
    arrays should not call this.
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

    Existing objects stay to the end, so they are excluded. A thousand completions in flight add
    about 150 each: full collections become ten times rarer, one in two minutes. Reference cycles
    must be rare; each connection that asyncio has closed is one (see `IDLE_SECONDS`).
    """
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 10 * old)


def require_open_files() -> None:
    """Raises the limit of open files, which children inherit, or RunError if that is too low."""
    if (limit := raise_file_limit(_FILES_OF_RUN)) < _LEAST_FILES:
        raise RunError(
            f"A run must be allowed to open {_LEAST_FILES} files at once, for its connections, got "
            f"{limit}, the hard limit (ulimit -Hn), which this shell cannot raise. Start a new shell, or have it "
            "raised where it is set (/etc/security/limits.conf, LimitNOFILE, docker run --ulimit nofile=4096)."
        )
