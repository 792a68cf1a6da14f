# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Handles Ctrl-C and SIGTERM: the run ends in order, and within a bounded time."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from torchtitan.grpo.system.logs import logger

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Interval at which a rank checks that torchrun is still running.
_AGENT_POLL_SECONDS = 1.0


class StopRequest:
    """Turns SIGINT and SIGTERM into a flag, ``signum``, that the training loop reads.

    Under torchrun each rank may receive the signal more than once (from the terminal and from
    torchrun), so a repeated signal has no effect. If torchrun itself has died, this counts as
    SIGTERM, because nothing else would end its ranks. If the process has not ended by itself within
    ``timeout_seconds`` of the signal, it is ended at once; the kernel then sends SIGTERM to its
    children (see `child.py`).

    Python runs signal handlers on the main thread only, and this thread may be inside a collective
    that waits for a dead rank. The interpreter's own handler also writes to a pipe, however, so the
    thread that reads the pipe always notices the signal and starts the clock.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.signum: int | None = None
        self._on_hangup: Callable[[], None] | None = None
        self._parent = os.getppid()
        # A run that was started without torchrun may outlive the shell that started it.
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
        """Exit status of a process that a signal ended, by the convention of shells."""
        return 128 + (self.signum or 0)

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for a stop request; returns whether there was one in time."""
        deadline = time.monotonic() + timeout_seconds
        while not self.requested and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.requested

    def on_hangup(self, callback: Callable[[], None]) -> None:
        """Makes SIGHUP call ``callback`` on another thread instead of ending the process.

        Users must send SIGHUP to this process alone: torchrun ends all ranks when it receives one.
        """
        self._on_hangup = callback
        # With any Python handler, the interpreter writes to the pipe that the other thread reads.
        signal.signal(signal.SIGHUP, lambda *_: None)
        logger.info("To read inference.urls_file again at once: kill -HUP %d", os.getpid())

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
            f"The run did not end within grpo.stop_timeout_seconds ({self.timeout_seconds:g} s) after "
            f"{signal.Signals(self.signum or 0).name}, so this process exits now. Raise the setting "
            "if a step or a checkpoint takes longer.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(self.exit_code)
