# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Records what this process does and when, for a timeline of the run (``observe.timeline``).

Each process appends to a file of its own, ``<folder>/timeline/<process>.<pid>.jsonl``::

    {"process": "rank 0", "pid": 7, "host": "a", "boot": "...", "start": 1, "time": ..., "monotonic": ...}
    ["training", "forward", 8123456789, 42000, {"step": 3}]        begin and duration in microseconds
    {"sync": "first batch", "monotonic": ...}                     a moment that all ranks share

Times are those of ``time.monotonic()``, which is one clock on one host. Any thread may record; it then writes
256 spans, or those of a second. A span costs about 2 µs and 60 to 150 bytes of the file, at most 512 MiB.
"""

import atexit
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.grpo.system.disk_failures import describe_failure
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.system.network import boot_id

FOLDER = "timeline"
VARIABLE = "TORCHTITAN_GRPO_TIMELINE"
"""Number of the start and the run's folder, for the processes that a recording process starts."""

_MAX_BYTES = 512 * 2**20
_BATCH, _BATCH_SECONDS, _GAP_SECONDS = 256, 1.0, 0.005


class _Recorder:
    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self.pending, self.due = deque[Any](), 0.0  # any thread appends
        self._writing = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        # A later start may have the same process ids, as in a container, and continues the file.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._num_bytes = os.fstat(self._file).st_size
        cut = b"\n" if self._num_bytes else b""  # the end of a killed process's last line
        os.write(self._file, b"%b%b\n" % (cut, msgspec.json.encode(header)))

    def write(self, *, wait: bool = False) -> None:
        if not self._writing.acquire(blocking=wait):
            return  # another thread writes
        try:
            taken = [self.pending.popleft() for _ in range(len(self.pending))]
            self.due = time.monotonic() + _BATCH_SECONDS
            text = memoryview(self._encoder.encode_lines(taken))
            self._num_bytes += len(text)
            while text:
                text = text[os.write(self._file, text) :]
            if self._num_bytes >= _MAX_BYTES:
                self._stop(f"{self._path} has {_MAX_BYTES >> 20} MiB")
        except (OSError, ValueError, TypeError) as error:
            self._stop(describe_failure([error], self._path))
        finally:
            self._writing.release()

    def _stop(self, reason: str) -> None:
        if _recorder is self:
            _forget()
            logger.warning(f"The run goes on, but the timeline of this process ends: {reason}.")

    def close(self) -> None:
        self.write(wait=True)
        with self._writing:
            file, self._file = self._file, -1  # another thread may still write
            os.close(file)


_recorder: _Recorder | None = None


def open_spans(folder: Path, process: str, start: int | None = None) -> None:
    """Starts to record below ``folder``, in the run's start of this number (None: the next one)."""
    global _recorder
    close_spans()
    if start is None:
        started = (path.name for path in folder.glob("starts/[0-9]*"))
        start = 1 + max((int(name) for name in started if name.isdecimal()), default=0)
    os.environ[VARIABLE] = f"{start} {folder.absolute()}"
    where = {
        "process": process,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": boot_id(),
    }
    now = {"start": start, "time": time.time(), "monotonic": time.monotonic()}
    path = folder / FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', process)}.{os.getpid()}.jsonl"
    try:
        _recorder = _Recorder(path, where | now)
    except OSError as error:
        logger.warning(f"This process has no timeline: {describe_failure([error], path)}.")


def open_inherited(process: str) -> None:
    """Starts to record if the process that started this one records."""
    if told := os.environ.get(VARIABLE):
        start, _, folder = told.partition(" ")
        open_spans(Path(folder), process, int(start))


def is_on() -> bool:
    return _recorder is not None


def add(track: str, name: str, begin: float, end: float, **args: Any) -> None:
    """Records what ``track`` did between two times; ``args`` are small JSON values."""
    if (recorder := _recorder) is None:
        return
    recorder.pending.append((track, name, int(begin * 1e6), int((end - begin) * 1e6), args))
    if end > recorder.due or len(recorder.pending) >= _BATCH:
        recorder.write()


@contextmanager
def span(track: str, name: str, **args: Any) -> Iterator[None]:
    """Records the time in the context."""
    begin = time.monotonic()
    try:
        yield
    finally:
        add(track, name, begin, time.monotonic(), **args)


class Merged:
    """Records short steps in a row that have one name as one span of up to a second."""

    def __init__(self, track: str) -> None:
        self._track, self._name, self._begin, self._end, self._count = track, "", 0.0, 0.0, 0

    def add(self, name: str, begin: float, end: float) -> None:
        has_gap = begin > self._end + _GAP_SECONDS
        if name != self._name or has_gap or end > self._begin + _BATCH_SECONDS:
            self.flush()
            self._name, self._begin = name, begin
        self._end, self._count = end, self._count + 1

    def flush(self) -> None:
        if self._count:
            add(self._track, self._name, self._begin, self._end, steps=self._count)
        self._count = 0


def sync(moment: str) -> None:
    """Records that a barrier of processes on several hosts ended just now, which aligns their clocks."""
    if (recorder := _recorder) is not None:
        recorder.pending.append({"sync": moment, "monotonic": time.monotonic()})
        recorder.write(wait=True)


def close_spans() -> None:
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def _forget() -> None:
    global _recorder
    _recorder = None


atexit.register(close_spans)
os.register_at_fork(after_in_child=_forget)
