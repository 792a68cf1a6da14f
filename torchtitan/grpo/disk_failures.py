# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Messages for disks that are full and folders that cannot be written."""

import errno
import re
import shutil
from pathlib import Path

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
# How safetensors, torch's serialization and other libraries without error numbers say it.
_NO_SPACE_TEXT = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_WRITE_FAILED_TEXT = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+")
_ALMOST_FULL_BYTES = 1 << 20


def disk_failure(error: BaseException, dump_folder: str) -> str | None:
    """Returns the message for an error of the disk, else ``None``.

    Args:
        error: One exception, without what it arose from.
        dump_folder: ``job.dump_folder``, where a run writes.
    """
    number = error.errno if isinstance(error, OSError) else None
    name = getattr(error, "filename", None)
    path = Path(name) if isinstance(name, str) else Path(dump_folder)
    text = str(error)
    wrote_half = _WRITE_FAILED_TEXT.search(text) and _free_bytes(path) < _ALMOST_FULL_BYTES
    if number in _NO_SPACE or _NO_SPACE_TEXT.search(text) or wrote_half:
        return (
            f"The disk of {path} is full: {_free_bytes(path) / 2**20:.0f} MiB are free. Make room, for "
            "instance with checkpoint.keep_latest_k, or put job.dump_folder on another disk, and start "
            "the same command again: with checkpoint.enable the run goes on from its last checkpoint."
        )
    if number in _NOT_WRITABLE and isinstance(error, OSError):
        return (
            f"{path} must be a place where this user may write, but: {error.strerror}. Change its "
            "permissions, or choose another folder with job.dump_folder."
        )
    return None


def _free_bytes(path: Path) -> int:
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue  # the path may not exist yet
    return 0
