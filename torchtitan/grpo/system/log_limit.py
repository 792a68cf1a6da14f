# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Limits the size of child processes' logs, which must be open for appending.

A thread empties a log that is too large, after copying its newest part to ``NAME.1`` beside it.
"""

import contextlib
import logging
import os
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 * 2**20
_LOOK_SECONDS = 0.25
_BLOCK_BYTES = 2**20


class LogLimit:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[int, Path] = {}
        self._told: set[Path] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pid: int, log: Path) -> None:
        with self._lock:
            self._logs[pid] = log
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="log-limit", daemon=True
                )
                self._thread.start()

    def remove(self, pid: int) -> None:
        """Checks the log of a child for the last time, as the child has ended. Further calls do nothing."""
        with self._lock:
            log = self._logs.pop(pid, None)
            if log is not None:
                self._look_at(log)
            if not self._logs:
                self._stop.set()
                self._thread = None

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_LOOK_SECONDS):
            with self._lock:
                for log in set(self._logs.values()):
                    self._look_at(log)

    def _look_at(self, log: Path) -> None:
        try:
            size = log.stat().st_size
            if size <= MAX_LOG_BYTES:
                return
            kept = log.with_name(f"{log.name}.1")
            with contextlib.suppress(OSError):  # it is emptied on a full disk as well
                _copy_end(log, kept, size)
            os.truncate(log, 0)
        except OSError:
            return  # it was removed
        if log not in self._told:
            self._told.add(log)
            logger.warning(
                "%s was larger than %d MiB and is emptied whenever it is. Its newest part is kept in %s. Have "
                "rewards and environments print less. (Told once.)",
                log,
                MAX_LOG_BYTES // 2**20,
                kept,
            )


def _copy_end(log: Path, kept: Path, size: int) -> None:
    """Copies the newest ``MAX_LOG_BYTES`` of a log, and what is added meanwhile, readable only by this user."""
    kept.unlink(missing_ok=True)
    descriptor = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with log.open("rb") as source, open(descriptor, "wb") as target:
        source.seek(size - MAX_LOG_BYTES)
        # To its end, also if it still grows, so that as little as possible is lost when it is emptied.
        while target.tell() < 2 * MAX_LOG_BYTES and (block := source.read(_BLOCK_BYTES)):
            target.write(block)


log_limit = LogLimit()
