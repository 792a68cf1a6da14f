# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lower priority than the training thread's, for cores and for the Python interpreter."""

import contextlib
import os
import sys

_NICE = 5
# Python's default is 5 ms: a busy thread keeps the interpreter that long from one that waits.
_SWITCH_SECONDS = 0.0005


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
