# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Settings of a process's priority, and of its memory if it runs an event loop for weeks."""

import contextlib
import ctypes
import gc
import logging
import os
import sys

logger = logging.getLogger(__name__)

_NICE = 5
# Python's default is 5 ms: a busy thread keeps the interpreter that long from one that waits.
_SWITCH_SECONDS = 0.0005
_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h
# Size of the blocks into which asyncio receives (`max_size` of its socket transports).
_RECEIVED_BYTES = 256 << 10


def yield_to_training() -> None:
    """Lowers the priority of the calling thread, and of every thread that it starts.

    A thread with the scheduling policy for batch work does not preempt the thread that wakes
    it up, and with a higher nice value it gets the smaller part of a core that both want.
    Both are hints that only Linux follows, and that a sandbox may forbid. In addition, all
    threads of the process release the interpreter sooner when another thread waits for it.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def map_large_blocks() -> None:
    """Keeps asyncio's receive buffers out of glibc's heap, which would grow for days otherwise.

    asyncio receives into a block of 256 KiB and then shrinks it to the bytes that arrived. If such
    blocks lie in the heap, small blocks that live longer are soon scattered over the freed rest, no
    room for the next large block is left, and the heap is extended. At first glibc maps blocks of
    128 KiB or more separately, and returns each to the kernel when it is freed. But whenever a
    larger mapping is freed, glibc raises this threshold to its size, unless a program has set it.

    Blocks of 256 KiB or more then cost a system call and page faults, so a process that computes
    with large arrays should not call this. Child processes do not inherit the setting.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library, such as musl
        return
    if mallopt(_M_MMAP_THRESHOLD, _RECEIVED_BYTES) == 0:
        logger.info("The C library refuses M_MMAP_THRESHOLD; memory may grow slowly.")


def spare_collections() -> None:
    """Makes the garbage collector block the event loop more rarely and for a shorter time.

    A full collection visits every object while nothing else runs. The objects that exist now stay
    until the end (modules, prompts), so they are excluded. With a thousand completions in flight
    about 150 objects remain for each, so full collections are also made ten times rarer than by
    default, about one in two minutes. Little memory waits for them as long as reference cycles are
    rare. Each connection that asyncio has closed is one, so clients reuse theirs (`IDLE_SECONDS`).
    """
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 10 * old)
