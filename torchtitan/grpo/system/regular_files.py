# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Opens only regular files as data, configuration or weights.

Opening a pipe waits for a writer that may never come, and a device such as ``/dev/zero`` never ends. Some files
of the kernel below ``/proc`` and ``/sys`` do one or the other, although they look like regular ones.
"""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

_KINDS = {
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
    """Refuses what is no regular file, without opening it.

    Raises:
        NotRegularError: If it is a pipe, a device, a socket, a directory, or a file of the kernel.
        OSError: If there is no such file, or it cannot be reached.
    """
    _refuse(path, os.stat(path).st_mode)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading, and never waits for a writer.

    Raises:
        NotRegularError: As of :func:`check_regular`.
        OSError: If the file cannot be opened.
    """
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
    """Returns the content of a regular file.

    Raises:
        NotRegularError: As of :func:`check_regular`.
        OSError: If the file cannot be read.
    """
    with open_regular(path) as file:
        return file.read()


def check_folder(folder: str | os.PathLike[str], *, below: bool = False) -> None:
    """Refuses a folder that holds anything but regular files and folders.

    For folders whose files a library opens. A link that leads nowhere is left to the library.

    Args:
        folder: The folder. Nothing is refused if it does not exist.
        below: Whether the folders in it are looked at as well.

    Raises:
        NotRegularError: If an entry is a pipe, a device, a socket, or a file of the kernel.
    """
    for parent, folders, files in os.walk(folder):
        _check_all(Path(parent, name) for name in files)
        if not below:
            folders.clear()


def _check_all(files: Iterable[Path]) -> None:
    for file in files:
        try:
            check_regular(file)
        except NotRegularError:
            raise
        except OSError:
            continue


def _refuse(path: str | os.PathLike[str], mode: int) -> None:
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is None and os.path.realpath(path).startswith(_OF_KERNEL):
        kind = "a file of the kernel"
    if kind is not None:
        raise NotRegularError(
            errno.EINVAL,
            f"it must be a regular file, but it is {kind}. Write the content to a file, and name that",
            os.fspath(path),
        )
