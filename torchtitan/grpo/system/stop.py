# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Handles Ctrl-C, SIGTERM and SIGHUP, so that the run ends in an orderly way within a bounded time."""

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from torchtitan.grpo.system.logs import logger

# Interval at which a rank checks that torchrun is still running.
_AGENT_POLL_SECONDS = 1.0


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask this process to end. SIGHUP is left out if it is ignored (``nohup``)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class StopRequest:
    """Turns stop signals into a flag, ``signum``, that the training loop reads.

    SIGHUP, as from a closed terminal, counts as SIGTERM. So does the death of torchrun, since nothing else
    would end its ranks. A rank may get one signal from the terminal and one from torchrun, so only the first
    counts. A process that still runs ``timeout_seconds`` later is ended, together with its children.

    Python runs signal handlers on the main thread, which may be stuck in a collective with a dead rank. The
    interpreter therefore also writes the signal to a pipe. The thread that reads it enforces the timeout.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.signum: int | None = None
        self._signaled_at = math.inf
        self._on_hangup: Callable[[], None] | None = None
        self._parent = os.getppid()
        # A run that was started without torchrun may outlive the shell that started it.
        self._has_agent = "TORCHELASTIC_RUN_ID" in os.environ
        self._pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in stop_signals():
            signal.signal(signum, self._handle)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    @property
    def requested(self) -> bool:
        return self.signum is not None

    def is_older_than(self, seconds: float) -> bool:
        return time.monotonic() - self._signaled_at > seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until this process is ended by force. Infinite if no stop signal has come."""
        return self._signaled_at + self.timeout_seconds - time.monotonic()

    @property
    def exit_code(self) -> int:
        return 128 + (self.signum or 0)

    def wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while not self.requested and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.requested

    def on_hangup(self, callback: Callable[[], None]) -> None:
        """Makes SIGHUP to this process call ``callback`` on another thread, in place of ending the run."""
        self._on_hangup = callback
        signal.signal(signal.SIGHUP, self._handle)  # under nohup it was ignored
        logger.info("To read inference.urls_file again at once: kill -HUP %d", os.getpid())

    def _handle(self, signum: int, frame: FrameType | None = None) -> None:
        if signum == signal.SIGHUP:
            if self._on_hangup is not None:
                return
            signum = signal.SIGTERM
        if self.signum is None:
            self.signum, self._signaled_at = signum, time.monotonic()

    def _watch(self) -> None:
        while not self.requested:
            if select.select([self._pipe], [], [], _AGENT_POLL_SECONDS)[0]:
                for signum in os.read(self._pipe, 64):
                    if signum == signal.SIGHUP and self._on_hangup is not None:
                        self._on_hangup()
                    elif signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                        self._handle(signum)
            elif self._has_agent and os.getppid() != self._parent:
                self._handle(signal.SIGTERM)
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
