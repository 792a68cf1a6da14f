# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ctrl-C and SIGTERM: end in order, and soon."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from torchtitan.tools.logging import logger

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How often a rank looks whether torchrun is still there.
_AGENT_POLL_SECONDS = 1.0


class StopRequest:
    """Turns SIGINT and SIGTERM into a flag that the training loop looks at.

    Under torchrun each rank may get the signal more than once (from the terminal and from
    the agent), so a repeated signal changes nothing. An agent that is gone counts as
    SIGTERM: nobody else would end its ranks. What cannot end in order by itself is ended
    after ``timeout_seconds``: children of this process then get SIGTERM from the kernel
    (see `child.py`).

    Python runs signal handlers on the main thread only, and that may be inside a collective
    that waits for a rank that is gone. The interpreter's own handler also writes to a pipe,
    so a thread that reads the pipe learns of the signal, and starts the clock, in any case.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.signum: int | None = None
        self._on_hangup: Callable[[], None] | None = None
        self._parent = os.getppid()
        # Only torchrun's ranks end with their parent; a run started by hand may outlive a shell.
        self._has_agent = "TORCHELASTIC_RUN_ID" in os.environ
        self._pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in _SIGNALS:
            signal.signal(signum, self._handle)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    @property
    def requested(self) -> bool:
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """The shell's convention for a process ended by a signal."""
        return 128 + (self.signum or 0)

    def wait(self, timeout_seconds: float) -> bool:
        """Returns when asked to stop, or after the timeout; True where asked."""
        deadline = time.monotonic() + timeout_seconds
        while not self.requested and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.requested

    def on_hangup(self, callback: Callable[[], None]) -> None:
        """From now on SIGHUP calls ``callback``, from another thread, and ends nothing.

        Send it to this process alone: torchrun ends all ranks when it gets one itself.
        """
        self._on_hangup = callback
        # What matters is that Python handles it: the handler's pipe tells the watching thread.
        signal.signal(signal.SIGHUP, lambda *_: None)
        logger.info("inference.urls_file is read again on: kill -HUP %d", os.getpid())

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum

    def _watch(self) -> None:
        while not self.requested:
            if select.select([self._pipe], [], [], _AGENT_POLL_SECONDS)[0]:
                for signum in os.read(self._pipe, 64):
                    if signum in _SIGNALS:
                        self.signum = self.signum or signum
                    elif signum == signal.SIGHUP and self._on_hangup is not None:
                        self._on_hangup()
            elif self._has_agent and os.getppid() != self._parent:
                self.signum = self.signum or signal.SIGTERM
        time.sleep(self.timeout_seconds)
        self._give_up()

    def _give_up(self) -> None:
        print(
            f"Not stopped within grpo.stop_timeout_seconds ({self.timeout_seconds:.0f} s) after "
            f"{signal.Signals(self.signum or 0).name}: exiting at once.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(self.exit_code)
