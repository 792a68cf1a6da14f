# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds out from a server's log why the server ended, and what the user can do."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_TAIL_BYTES = 4000
_LINE_CHARS = 200
_SEARCHED_BYTES = 4 << 20
_LONGEST_LINE = 1 << 16
_MAX_CAUSES = 3
_ALMOST_FULL_BYTES = 1 << 20
# The last line of a traceback, what the kernel says of a process, and how servers report that memory lacks.
_CAUSE = re.compile(
    r"\b\w*(Error|Exception): |Bus error|Segmentation fault|No space left|Killed|out of memory"
)
# What vLLM puts before a line: process, level, time and place.
_PREFIX = re.compile(r"(\(\w+ pid=\d+\) )?((?P<level>[A-Z]+) \d\S+ \S+ \[\S+:\d+\] )?")
# How a lack of shared memory looks: writing to it fails, or the kernel ends the process that does.
_SHARED_MEMORY = re.compile(
    r"Bus error|SIGBUS|No space left on device: '?/dev/shm|/dev/shm.*No space left|"
    r"unable to mmap .*No space left|[Ii]nsufficient (shared memory|space in /dev/shm)"
)


def first_causes(log_file: Path, begin: int = 0) -> str:
    """Returns the log's first lines that name an error, or "" if the end of the log contains all of them.

    (The end of the log is shown anyway.) Each process of a server prints a traceback when it ends. The first
    traceback has the cause. Lines before the byte ``begin`` belong to earlier servers at the same port.
    """
    lines = map(_without_prefix, _lines(log_file, begin))
    causes = dict.fromkeys(line[:_LINE_CHARS] for line in lines if _CAUSE.search(line))
    found = list(causes)[:_MAX_CAUSES]
    tail = log_tail(log_file, begin)
    if not found or all(line in tail for line in found):
        return ""
    return "The first errors in its log:\n  " + "\n  ".join(found) + "\n"


def remedy(log_file: Path, begin: int = 0) -> str:
    """Returns advice if a full disk, or shared memory errors in the log, explain the end of a server, else ""."""
    if (free := _free_bytes(log_file)) < _ALMOST_FULL_BYTES:
        return (
            f"The disk of {log_file} is full ({free / 2**20:.1f} MiB are free), so what it wrote may be "
            "lost. Make room, or put job.dump_folder on another disk.\n"
        )
    if not any(map(_SHARED_MEMORY.search, _lines(log_file, begin))):
        return ""
    return (
        "Its processes need more shared memory than /dev/shm has"
        f"{_shared_memory_size()}. Give a container more, for instance with `docker run --shm-size=8g` "
        "or `--ipc=host` (Kubernetes: an emptyDir with `medium: Memory` at /dev/shm), or remove what "
        "fills it.\n"
    )


def last_line(log_file: Path, begin: int = 0) -> str:
    lines = [line.strip() for line in log_tail(log_file, begin).splitlines() if line.strip()]
    return lines[-1][-_LINE_CHARS:] if lines else "(nothing yet)"


def log_tail(log_file: Path, begin: int = 0) -> str:
    try:
        with log_file.open("rb") as file:
            file.seek(max(begin, log_file.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"(log not readable: {error})"


def _without_prefix(line: str) -> str:
    """Removes vLLM's log prefix from a line. Returns "" for a line with another level than ERROR."""
    found = _PREFIX.match(line)
    assert found is not None, "the pattern matches nothing at least"
    return line[found.end() :].strip() if found["level"] in (None, "ERROR") else ""


def _lines(log_file: Path, begin: int) -> Iterator[str]:
    """Yields the lines in the ``_SEARCHED_BYTES`` from ``begin`` on, or none if the log is unreadable.

    The log is not read as one block, because the C library would keep the memory of such a large block
    after it is freed, and this process would stay larger.
    """
    try:
        with log_file.open("rb") as file:
            begin = begin if begin <= log_file.stat().st_size else 0  # it was emptied meanwhile
            file.seek(begin)
            while file.tell() < begin + _SEARCHED_BYTES and (line := file.readline(_LONGEST_LINE)):
                yield line.decode(errors="replace").rstrip("\r\n")
    except OSError:
        return


def _free_bytes(file: Path) -> int:
    try:
        return shutil.disk_usage(file.parent).free
    except OSError:
        return _ALMOST_FULL_BYTES  # nothing is known


def _shared_memory_size() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return ""
    return f" ({usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB are free)"
