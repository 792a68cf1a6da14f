# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ctrl-C and SIGTERM: end in order, and soon."""

import os
import signal
import sys
import threading
from types import FrameType


class StopRequest:
    """Turns SIGINT and SIGTERM into a flag that the training loop looks at.

    Under torchrun each rank may get the signal more than once (from the terminal and from
    the agent), so a repeated signal changes nothing. What cannot end in order by itself is
    ended after ``timeout_seconds``: children of this process then get SIGTERM from the
    kernel (see `child.py`).
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.signum: int | None = None
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._handle)

    @property
    def requested(self) -> bool:
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """The shell's convention for a process ended by a signal."""
        return 128 + (self.signum or 0)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            return
        self.signum = signum
        timer = threading.Timer(self.timeout_seconds, self._give_up)
        timer.name, timer.daemon = "stop-timeout", True
        timer.start()

    def _give_up(self) -> None:
        print(
            f"Not stopped within grpo.stop_timeout_seconds ({self.timeout_seconds:.0f} s) after "
            f"{signal.Signals(self.signum or 0).name}: exiting at once.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(self.exit_code)
