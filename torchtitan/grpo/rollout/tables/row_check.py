# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When the rows of a file are looked at: before training as far as that takes seconds.

Invariants:

- A file of up to :data:`FULL_CHECK_BYTES` is checked in full before training.
- Of a larger one, the first rows, the last one, and rows spread evenly between them are; the
  others are checked on a thread, which rests most of the time. What it finds is raised at the
  next prompt.
- Either way a row is checked when it is used, so nothing depends on the thread being in time.
"""

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

logger = logging.getLogger(__name__)

# Takes a second or two, while servers start.
FULL_CHECK_BYTES = 256 * 1024 * 1024
_FIRST_ROWS = 1024
_SPREAD_ROWS = 4096

# A fifth of a core; and the event loop of the process never waits longer than a slice.
_WORK_SECONDS = 0.002
_REST_SECONDS = 0.008
_CLOSE_SECONDS = 10.0


def sample_rows(num_rows: int) -> list[int]:
    """The rows of a large file that are checked before training, in order."""
    spread = np.linspace(0, num_rows - 1, min(num_rows, _SPREAD_ROWS)).astype(np.int64)
    return np.union1d(np.arange(min(num_rows, _FIRST_ROWS)), spread).tolist()


class BackgroundCheck:
    """Checks all rows on a thread of its own, until one is bad.

    Args:
        check_block: Checks some rows from the one of this number on, well within a
            millisecond, and returns the number of the one behind them; raises ValueError where
            one is bad. Called on the thread.
        num_rows: Rows to check.
        path: The file, for messages.
    """

    def __init__(self, check_block: Callable[[int], int], num_rows: int, path: str) -> None:
        self._check_block = check_block
        self._num_rows = num_rows
        self._path = path
        self._error: ValueError | None = None
        self._closing = threading.Event()
        # A daemon: it only reads, and must not keep a process alive that failed elsewhere.
        self._thread = threading.Thread(target=self._run, name="prompt-check", daemon=True)
        self._thread.start()

    def raise_error(self) -> None:
        """Raises what was found until now.

        Raises:
            ValueError: A row is bad.
        """
        if self._error is not None:
            raise self._error

    def wait(self, timeout_seconds: float) -> None:
        """Waits until all rows are checked, or one is found bad.

        Raises:
            TimeoutError: That takes longer.
        """
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"The rows of {self._path} are not checked in {timeout_seconds} s.")

    def close(self) -> None:
        """Ends the thread, within a row's time."""
        self._closing.set()
        self.wait(_CLOSE_SECONDS)

    def _run(self) -> None:
        began = rested = time.monotonic()
        checked = 0
        while checked < self._num_rows:
            try:
                checked = self._check_block(checked)
            except ValueError as error:
                self._error = error
                logger.error("%s", error)
                return
            if time.monotonic() - rested >= _WORK_SECONDS:
                if self._closing.wait(_REST_SECONDS):
                    return
                rested = time.monotonic()
        logger.info(
            "All %d rows of %s are checked, in %.0f s",
            self._num_rows,
            self._path,
            time.monotonic() - began,
        )
