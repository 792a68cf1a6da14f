# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Temporary folders of a process, which a later one removes if the process was killed.

The name of a folder tells which process made it. A process that is killed by kill -9 cannot remove its
folder, so the process that makes the next folder removes those whose process is gone. The process
number of another container means nothing here. Each process therefore holds a lock on its folder, which
the kernel releases when the process ends.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from torchtitan.grpo.system.process_identity import start_time
from torchtitan.grpo.system.shared_memory import remove_noted

_OURS = re.compile(r"torchtitan-grpo-[a-z]+-(\d+)-(\d+)-\w+")
# Kept open as long as the folders are this process's.
_locks: dict[Path, int] = {}
# The path of a Unix socket is limited to 107 bytes on Linux and 103 on macOS.
_LONGEST_FOLDER = 80


def make_private_folder(purpose: str) -> Path:
    """Returns a new folder that only this user can enter, and removes those left by killed processes.

    Its path is short enough for Unix sockets in it.

    Args:
        purpose: One word of lower-case letters, which the name shows.
    """
    pid = os.getpid()
    prefix = f"torchtitan-grpo-{purpose}-{pid}-{start_time(pid) or 0}-"
    parent = tempfile.gettempdir()
    if len(parent) + len(prefix) > _LONGEST_FOLDER - 10:
        parent = "/tmp"
    _remove_left_behind(Path(parent))
    made = Path(tempfile.mkdtemp(prefix=f"new-{prefix}", dir=parent))  # mode 0700
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # without locks, only the process number tells
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    # The folder gets its name when it is locked, so that no other process removes it before.
    folder = made.rename(made.with_name(made.name.removeprefix("new-")))
    _locks[folder] = lock
    return folder


def remove_private_folder(folder: Path) -> None:
    """Removes a folder, and the shared memory that is noted in it and that no process holds."""
    remove_noted(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def _remove_left_behind(parent: Path) -> None:
    for folder in parent.glob("torchtitan-grpo-*"):
        match = _OURS.fullmatch(folder.name)
        # Without a start time (on systems without /proc) nothing tells whether the process lives.
        if match is None or match[2] == "0" or start_time(int(match[1])) == match[2]:
            continue
        with contextlib.suppress(OSError):
            is_own = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if is_own and not _is_locked(folder):
                remove_private_folder(folder)


def _is_locked(folder: Path) -> bool:
    """Returns whether a living process, perhaps in another container, holds a folder's lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
