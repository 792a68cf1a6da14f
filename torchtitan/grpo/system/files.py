# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads only regular files, and writes files whole or not at all.

Reading a pipe waits for a writer that may never come, and reading a device may never end. Some files in
``/proc`` and ``/sys`` behave like that. ``sums_<name>.json`` holds sizes and checksums of files beside it.
"""

import contextlib
import errno
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
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
_READ_BYTES = 16 * 2**20

Sums = dict[str, tuple[int, int]]
"""Size and CRC-32 of files, by name."""


class NotRegularError(OSError):
    """A path must not be opened, because it is not a regular file. The message says what it is."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises NotRegularError if a path is a pipe, a device or a directory, without opening it."""
    _refuse(path, os.stat(path).st_mode)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading. Raises NotRegularError for other paths, such as pipes."""
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
    """Raises NotRegularError if a folder holds anything but regular files. A missing folder passes.

    With ``below``, its subfolders are checked as well.
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
    """Writes a file in one rename, durably, and makes its folder.

    If that fails, as on a full disk, no partial file remains, and a file that was there is unchanged.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes the entries of a folder durable, so that new names survive a crash of the machine."""
    with contextlib.suppress(OSError):  # not every system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_sums(file: Path, sums: Sums) -> None:
    write_whole(file, json.dumps(sums, allow_nan=False).encode())


def read_sums(folder: Path) -> Sums:
    """Returns all checksums of a folder. Raises ValueError if a file of checksums is damaged."""
    sums: Sums = {}
    for file in sorted(folder.glob("sums_*.json")):
        try:
            found = json.loads(read_regular(file))
            sums |= {name: (int(size), int(crc)) for name, (size, crc) in found.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file.name} is damaged: {error}") from error
    return sums


def sums_of(files: Iterable[Path]) -> Sums:
    return {file.name: (file.stat().st_size, _crc_of(file)) for file in files}


def damaged_files(
    folder: Path,
    share: int = 0,
    num_shares: int = 1,
    *,
    is_wanted: Callable[[str, int], bool] = lambda name, size: True,
) -> Iterator[str]:
    """Yields the names of files whose content differs from their checksums.

    Checks only share number ``share`` of ``num_shares``, so that ranks can divide the work, and only files
    whose name and size ``is_wanted`` accepts. A folder without checksums counts as undamaged.
    """
    try:
        sums = read_sums(folder)
    except ValueError as error:
        yield str(error)
        return
    wanted = sorted(name for name, (size, _) in sums.items() if is_wanted(name, size))
    for name in wanted[share::num_shares]:
        try:
            found = _crc_of(folder / name)
        except OSError as error:
            yield f"{name} ({error.strerror})"
            continue
        if found != sums[name][1]:
            yield name


def _crc_of(file: Path) -> int:
    crc = 0
    with open_regular(file) as stream:
        while data := stream.read(_READ_BYTES):
            crc = zlib.crc32(data, crc)
    return crc
