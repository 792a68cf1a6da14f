# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``events.jsonl``: the warnings and errors that a run's console has shown, one JSON object a line."""

import logging
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

from torchtitan.grpo.observe.run_log import RunLog

FILE = "events.jsonl"


class Events(logging.Handler):
    """Writes warnings and errors into the folder of a run, from :meth:`begin` to :meth:`close`.

    Before that they wait in memory, and afterwards for the next `close`, which a run calls at its very end.
    A text that is repeated is written again, with its number, at the 10th, 100th, 1000th ... time. ``step``
    is the last completed step. Without a ``folder``, nothing is ever written.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.folder: Path | None = None
        self.step = 0
        self._log: RunLog | None = None
        self._waiting: list[tuple[float, str, str]] = []  # time, level and text
        self._counts: Counter[int] = Counter()  # by hash, because texts are long
        self._is_writing = False

    def begin(self, folder: Path, step: int) -> None:
        """Opens the file, which keeps its records up to ``step``, and writes what has waited."""
        self.acquire()
        try:
            self.folder, self.step = folder, step
            self._log = RunLog(folder / FILE, step)
            self._write()
        finally:
            self.release()

    def add(self, level: str, text: str) -> None:
        """Adds what was printed without the logger. ``level`` is ``warning`` or ``error``."""
        number = logging.getLevelNamesMapping()[level.upper()]
        self.handle(logging.LogRecord("", number, "", 0, text, None, None))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage().encode(errors="replace").decode()
            level = "error" if record.levelno >= logging.ERROR else "warning"
            self._waiting.append((record.created, level, text))
            self._write()
        except Exception:  # as all handlers do: no message may end what it tells of
            self.handleError(record)

    def close(self) -> None:
        """Writes what still waits, and closes the file. More may follow, until the next call."""
        self.acquire()
        try:
            if self._log is None and self._waiting and self.folder is not None:
                with suppress(OSError):  # the error was shown, and the run has ended
                    self._log = RunLog(self.folder / FILE, sys.maxsize)
                    self._write()
            if self._log is not None:
                log, self._log = self._log, None
                log.close()
        finally:
            self.release()

    def _write(self) -> None:
        # If the disk is full, the log reports an error, which comes here again.
        if self._log is None or self._is_writing:
            return
        self._is_writing = True
        try:
            while self._waiting:
                when, level, text = self._waiting.pop(0)
                self._counts[hash(text)] += 1
                count = self._counts[hash(text)]
                if count == 10 ** (len(str(count)) - 1):
                    text += f" ({count} times so far)" if count > 1 else ""
                    told = {"step": self.step, "time": when, "level": level, "text": text}
                    self._log.add(told)
        finally:
            self._is_writing = False


events = Events()
"""Those of this process. Only rank 0 of a run gives it a folder."""
