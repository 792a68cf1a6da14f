# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the rows of a file: as far as that takes only seconds, before training.

Invariants:

- A file of at most :data:`FULL_CHECK_BYTES` is checked in full before training.
- Of a larger file, the first rows, the last row and rows spread evenly between them are checked
  before training. A background thread, which sleeps most of the time, checks the others. An
  error that it finds is raised at the next prompt.
- In both cases each row is checked again when it is used, so nothing depends on the thread
  being in time.
"""

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

logger = logging.getLogger(__name__)

# Checking this much takes a second or two, while the servers start.
FULL_CHECK_BYTES = 256 * 1024 * 1024
_FIRST_ROWS = 1024
_SPREAD_ROWS = 4096

# The thread uses a fifth of a core. The event loop waits for one slice at most.
_WORK_SECONDS = 0.002
_REST_SECONDS = 0.008
_CLOSE_SECONDS = 10.0


def sample_rows(num_rows: int) -> list[int]:
    """Returns the rows of a large file that are checked before training, in order."""
    spread = np.linspace(0, num_rows - 1, min(num_rows, _SPREAD_ROWS)).astype(np.int64)
    return np.union1d(np.arange(min(num_rows, _FIRST_ROWS)), spread).tolist()


class BackgroundCheck:
    """Checks all rows in a background thread, until a row is invalid.

    Args:
        check_block: Checks some rows starting at the given row, well within a millisecond, and
            returns the number of the next row. It raises ``ValueError`` if a row is invalid. It is
            called in the thread.
        num_rows: Number of rows to check.
        path: The file, for messages.
    """

    def __init__(self, check_block: Callable[[int], int], num_rows: int, path: str) -> None:
        self._check_block = check_block
        self._num_rows = num_rows
        self._path = path
        self._error: ValueError | None = None
        self._closing = threading.Event()
        # A daemon, because it only reads and must not keep a failed process alive.
        self._thread = threading.Thread(target=self._run, name="prompt-check", daemon=True)
        self._thread.start()

    def raise_error(self) -> None:
        """Raises the error that the check has found, if any.

        Raises:
            ValueError: If a row is invalid.
        """
        if self._error is not None:
            raise self._error

    def wait(self, timeout_seconds: float) -> None:
        """Waits until all rows are checked, or one is found to be invalid.

        Raises:
            TimeoutError: If this takes longer than ``timeout_seconds``.
        """
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(
                f"The rows of {self._path} were not all checked within {timeout_seconds} s."
            )

    def close(self) -> None:
        """Ends the thread, after the row that it is checking."""
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
            "All %d rows of %s were checked in %.0f s.",
            self._num_rows,
            self._path,
            time.monotonic() - began,
        )
