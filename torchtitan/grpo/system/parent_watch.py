# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ends a process that another program started, once its parent has ended."""

import os
import signal
import threading
import time

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_started = threading.Lock()


def end_with_parent() -> None:
    """Has a thread send SIGTERM to this process when its parent has ended, and then SIGKILL.

    For processes that this package does not start itself; see `child.py` for the others. Further
    calls do nothing.
    """
    if not _started.acquire(blocking=False):
        return
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
