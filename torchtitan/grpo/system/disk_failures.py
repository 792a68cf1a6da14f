# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Messages for disks that are full and folders that cannot be written."""

import errno
import os
import re
from pathlib import Path

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
# Messages of libraries without error numbers, such as safetensors, and of torch's serialization,
# which finds only that a file is shorter than what it wrote.
_TEXTS = {
    errno.ENOSPC: re.compile(r"No space left on device", re.IGNORECASE),
    errno.EDQUOT: re.compile(r"Disk quota exceeded", re.IGNORECASE),
    errno.EFBIG: re.compile(r"File too large", re.IGNORECASE),
    errno.EMFILE: re.compile(r"Too many open files", re.IGNORECASE),
    errno.EROFS: re.compile(r"Read-only file system", re.IGNORECASE),
}
_CUT_SHORT = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+")
_ALMOST_FULL_MIB = 1


def disk_failure(error: BaseException, dump_folder: str) -> str | None:
    name = getattr(error, "filename", None)
    path = Path(name) if isinstance(name, str) else Path(dump_folder)
    if no_room := disk_space_problem([error], path):
        return (
            f"{no_room[0].upper()}{no_room[1:]}. Make room, for instance with "
            "checkpoint.keep_latest_k, or put job.dump_folder on another disk, and start the same "
            "command again: with checkpoint.enable the run goes on from its last checkpoint."
        )
    if isinstance(error, OSError) and _number(error) in _NOT_WRITABLE:
        return (
            f"{path} must be a place where this user may write, but: {error.strerror}. Change its "
            "permissions, or choose another folder with job.dump_folder."
        )
    return None


def disk_space_problem(errors: list[BaseException], path: Path) -> str | None:
    """Returns a clause that says why a disk took no more data, or None if the errors have another cause."""
    numbers, disk = {_number(error) for error in errors}, _disk_of(path)
    mib = disk.f_bavail * disk.f_frsize / 2**20
    # File systems without a fixed number of inodes state 0 of 0.
    if errno.ENOSPC in numbers and disk.f_files and not disk.f_favail:
        return f"the disk of {path} takes no more files: all its inodes are used (df -i)"
    is_short = any(_CUT_SHORT.search(str(error)) for error in errors)
    if errno.EDQUOT in numbers:
        return f"the quota on the disk of {path} is used up, though {mib:.0f} MiB of it are free"
    if errno.ENOSPC in numbers or (is_short and mib < _ALMOST_FULL_MIB):
        return f"the disk of {path} is full: {mib:.0f} MiB are free"
    if numbers & {errno.EMFILE, errno.ENFILE}:
        return "too many files are open (ulimit -n)"
    if errno.EFBIG in numbers:
        return f"a file in {path} would be larger than the system allows (ulimit -f)"
    if is_short:
        return (
            f"the disk of {path} took a part of a file only, with {mib:.0f} MiB free: it was full, or a "
            "quota or a limit of the size of files (ulimit -f) was reached"
        )
    return None


def describe_failure(errors: list[BaseException], path: Path) -> str:
    """Describes in one line why something was not written to a path."""
    text = f"{type(errors[0]).__name__}: {errors[0]}".splitlines()[0]
    no_room = disk_space_problem(errors, path)
    return f"{no_room} ({text})" if no_room else text


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return next((number for number, text in _TEXTS.items() if text.search(str(error))), None)


def _disk_of(path: Path) -> os.statvfs_result:
    """The disk of a path, which need not exist yet."""
    try:
        return os.statvfs(path)
    except OSError:
        if path.parent == path:
            raise
        return _disk_of(path.parent)
