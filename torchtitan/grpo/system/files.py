# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads only regular files as data, configuration or weights, and writes files whole or not at all.

Opening a pipe waits for a writer that may never come, and a device such as ``/dev/zero`` never ends. Some files
of the kernel below ``/proc`` and ``/sys`` do one or the other, although they look like regular ones.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_TYPES = {
    stat.S_IFIFO: "a pipe (a FIFO, or a process substitution as <(...))",
    stat.S_IFCHR: "a device or a terminal",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}
_OF_KERNEL = ("/proc/", "/sys/")


class NotRegularError(OSError):
    """A path names something that must not be opened as a file; the message gives the reason."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuses what is no regular file, such as a pipe, a device or a directory, without opening it."""
    _refuse(path, os.stat(path).st_mode)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading, and never waits for a writer."""
    check_regular(path)
    # Another file may have taken its place by now, and opening a pipe would wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _refuse(path, os.fstat(descriptor).st_mode)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    with open_regular(path) as file:
        return file.read()


def check_folder(folder: str | os.PathLike[str], *, below: bool = False) -> None:
    """Refuses a folder, and with ``below`` those in it, that holds anything but regular files and folders.

    For folders whose files a library opens. A link that leads nowhere is left to the library, and a
    folder that does not exist is not refused.
    """
    for parent, folders, files in os.walk(folder):
        for name in files:
            try:
                check_regular(Path(parent, name))
            except NotRegularError:
                raise
            except OSError:
                continue
        if not below:
            folders.clear()


def _refuse(path: str | os.PathLike[str], mode: int) -> None:
    found = _TYPES.get(stat.S_IFMT(mode))
    if found is None and os.path.realpath(path).startswith(_OF_KERNEL):
        found = "a file of the kernel"
    if found is not None:
        raise NotRegularError(
            errno.EINVAL,
            f"it must be a regular file, but it is {found}. Write the content to a file, and name that",
            os.fspath(path),
        )


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file in one rename, durably, and makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
