# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Records what this process does and when, for a timeline of the run (``observe.timeline``).

Each process appends to a file of its own, ``<folder>/timeline/<process>.<pid>.jsonl``::

    {"process": "rank 0", "pid": 7, "host": "a", "boot": "...", "start": 1, "time": ..., "monotonic": ...}
    ["training", "forward", 8123456789, 42000, {"step": 3}]        begin and duration in microseconds
    {"sync": "first batch", "monotonic": ...}                     a moment that all ranks share

Times are those of ``time.monotonic()``, which is one clock on one host. `observe/timeline.py` merges
the files. A span costs about 1 µs, and 60 to 150 bytes of the file, which ends at 512 MiB.
The calling thread writes them, 256 at a time or those of a second.
"""

import atexit
import os
import re
import socket
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.grpo.system.disk_failures import describe_failure
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.system.network import boot_id

FOLDER = "timeline"
_MAX_BYTES = 512 * 2**20
_BATCH = 256
_BATCH_SECONDS = 1.0

_NOTHING = nullcontext()


class _Recorder:
    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        # Any thread appends; only the one that holds the lock takes out.
        self.pending = deque[Any]()
        self.due = 0.0
        self._writing = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        # A later start may have the same process ids, as in a container, and continues the file.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._num_bytes = os.fstat(self._file).st_size
        # A killed process may have left the last line open.
        os.write(self._file, (b"\n" if self._num_bytes else b"") + msgspec.json.encode(header))
        os.write(self._file, b"\n")

    def write(self, *, wait: bool = False) -> None:
        if not self._writing.acquire(blocking=wait):
            return  # another thread writes
        try:
            self._write_pending()
        except OSError as error:
            self._stop(f"they could not be written: {describe_failure([error], self._path)}")
        finally:
            self._writing.release()

    def _write_pending(self) -> None:
        taken = [self.pending.popleft() for _ in range(len(self.pending))]
        self.due = time.monotonic() + _BATCH_SECONDS
        text = memoryview(self._encoder.encode_lines([_line(each) for each in taken]))
        self._num_bytes += len(text)
        while text:
            text = text[os.write(self._file, text) :]
        if self._num_bytes >= _MAX_BYTES:
            self._stop(f"its file has {_MAX_BYTES >> 20} MiB, and is {self._path}")

    def _stop(self, reason: str) -> None:
        global _recorder
        if _recorder is self:
            _recorder = None
            logger.warning(
                f"The timeline of this process ends here, and the run goes on: {reason}."
            )

    def close(self) -> None:
        self.write(wait=True)
        with self._writing:
            os.close(self._file)


def _line(taken: Any) -> Any:
    if isinstance(taken, dict):
        return taken
    track, name, begin, end, args = taken
    told = {key: value for key, value in args.items() if value is not None}
    return track, name, int(begin * 1e6), int((end - begin) * 1e6), told


_recorder: _Recorder | None = None


def open_spans(folder: Path, process: str) -> None:
    """Starts to record this process's spans below ``folder``; without it, every call here does nothing."""
    global _recorder
    close_spans()
    header = {"process": process, "pid": os.getpid(), "host": socket.gethostname()}
    header |= {"boot": boot_id(), "start": _start_number(folder)}
    header |= {"time": time.time(), "monotonic": time.monotonic()}
    path = folder / FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', process)}.{os.getpid()}.jsonl"
    try:
        _recorder = _Recorder(path, header)
    except OSError as error:
        logger.warning(f"This process has no timeline: {describe_failure([error], path)}.")


def is_on() -> bool:
    return _recorder is not None


def add(track: str, name: str, begin: float, end: float, **args: Any) -> None:
    """Records what ``track`` did between two times of ``time.monotonic()``; any thread may call it.

    ``args`` are small JSON values; those that are None are left out.
    """
    if (recorder := _recorder) is None:
        return
    recorder.pending.append((track, name, begin, end, args))
    if end > recorder.due or len(recorder.pending) >= _BATCH:
        recorder.write()


def span(track: str, name: str, **args: Any) -> AbstractContextManager[None]:
    """Records the time in the context."""
    return _NOTHING if _recorder is None else _Span(track, name, args)


class _Span(AbstractContextManager[None]):
    def __init__(self, track: str, name: str, args: dict[str, Any]) -> None:
        self._track, self._name, self._args = track, name, args

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(self, *_: object) -> None:
        add(self._track, self._name, self._begin, time.monotonic(), **self._args)


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


def _start_number(folder: Path) -> int:
    numbers = (path.name for path in folder.glob("starts/[0-9]*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _forget() -> None:
    global _recorder
    _recorder = None


atexit.register(close_spans)
os.register_at_fork(after_in_child=_forget)
