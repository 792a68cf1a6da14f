# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Temporary folders of a process, which a later one removes if the process was killed.

The name of a folder tells which process made it. Nobody can remove a folder after kill -9, so whoever
makes the next one removes those whose process is gone.
"""

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from torchtitan.grpo.system.shared_memory import remove_noted

_OURS = re.compile(r"torchtitan-grpo-[a-z]+-(\d+)-(\d+)-\w+")
# The path of a Unix socket is limited to 107 bytes on Linux and 103 on macOS.
_LONGEST_FOLDER = 80


def make_private_folder(purpose: str) -> Path:
    """Returns a new folder that only this user can enter, and removes those left by killed processes.

    Its path is short enough for Unix sockets in it.

    Args:
        purpose: One word of lower-case letters, which the name shows.
    """
    pid = os.getpid()
    prefix = f"torchtitan-grpo-{purpose}-{pid}-{_start_time(pid)}-"
    parent = tempfile.gettempdir()
    if len(parent) + len(prefix) > _LONGEST_FOLDER - 10:
        parent = "/tmp"
    _remove_left_behind(Path(parent))
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # mode 0700


def remove_private_folder(folder: Path) -> None:
    """Removes a folder, and the shared memory that is noted in it and that nobody holds."""
    remove_noted(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_left_behind(parent: Path) -> None:
    for folder in parent.glob("torchtitan-grpo-*"):
        match = _OURS.fullmatch(folder.name)
        # Without a start time (on systems without /proc) nothing tells whether the process lives.
        if match is None or match[2] == "0" or _start_time(int(match[1])) == match[2]:
            continue
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                remove_private_folder(folder)


def _start_time(pid: int) -> str:
    """Returns when a process started, since its number is used again later; 0 if unknown."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return "0"
