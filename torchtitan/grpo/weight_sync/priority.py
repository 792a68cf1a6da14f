# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The training thread goes first: for a core, where there are too few, and for the interpreter."""

import contextlib
import os
import sys

_NICE = 5
# Python's own is 5 ms: for so long a busy thread keeps the interpreter from one that wants it.
_SWITCH_SECONDS = 0.0005


def yield_to_training() -> None:
    """The calling thread, and every thread that it starts, gives way to the training thread.

    As batch work it does not take the core of the thread that wakes it up, and with a higher
    nice value it gets the smaller share of a core that both want. Both are hints, which Linux
    alone takes, and which a sandbox may forbid. The interpreter it gives back sooner, as all
    threads of the process then do.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
