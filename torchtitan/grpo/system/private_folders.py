# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Temporary folders of processes. Making one also removes those that killed processes left behind.

Each process holds a lock on its folder, which the kernel releases when the process ends. (A process id
would not do, because it means nothing in another container.) Programs such as SGLang leave files with
random names in shared memory. :func:`note_held` notes these in the folder. They are removed together
with the folder, unless a process still uses them.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import psutil

_OURS = re.compile(r"torchtitan-grpo-[a-z]+-\d+-\w+")
# Kept open as long as the folders are this process's.
_locks: dict[Path, int] = {}
# The path of a Unix socket is limited to 107 bytes on Linux and 103 on macOS.
_LONGEST_FOLDER = 80

_SHARED_MEMORY = Path("/dev/shm")
_NOTE = "shared_memory"
# The kernel gives the first PID namespace, whose /proc lists all processes, this inode
# (PROC_PID_INIT_INO in include/linux/proc_ns.h).
_ALL_PROCESSES = 0xEFFFFFFC


def make_private_folder(purpose: str) -> Path:
    """Makes a folder that only this user can open, with a path short enough for Unix sockets in it."""
    prefix = f"torchtitan-grpo-{purpose}-{os.getpid()}-"
    parent = tempfile.gettempdir()
    if len(parent) + len(prefix) > _LONGEST_FOLDER - 10:
        parent = "/tmp"
    _remove_left_behind(Path(parent))
    made = Path(tempfile.mkdtemp(prefix=f"new-{prefix}", dir=parent))  # mode 0700
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # without locks, nobody removes it but this process
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    # The folder gets its name when it is locked, so that no other process removes it before.
    folder = made.rename(made.with_name(made.name.removeprefix("new-")))
    _locks[folder] = lock
    return folder


def remove_private_folder(folder: Path) -> None:
    remove_noted(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def _remove_left_behind(parent: Path) -> None:
    for folder in parent.glob("torchtitan-grpo-*"):
        if not _OURS.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):
            is_own = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if is_own and not _is_locked(folder):
                remove_private_folder(folder)


def _is_locked(folder: Path) -> bool:
    """Whether a folder may be in use: a process holds its lock, or the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def note_held(session: int, folder: Path) -> None:
    """Notes in ``folder`` the shared memory that a session's processes use now, for later removal.

    Also notes Python semaphores younger than the session that no process uses, which vLLM and SGLang leave
    behind. In a container, these are left out, because processes outside that use them cannot be seen.
    """
    # The files are listed before the processes, so that a file that is made meanwhile is not noted.
    files, young = _files(), _semaphores_since(session)
    of_session: set[int] = set()
    of_anybody: set[int] = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            inodes = _held_by(pid)
            of_anybody |= inodes
            if os.getsid(pid) == session:
                of_session |= inodes
    held = {name for name, inode in files.items() if inode in of_session}
    if sees_all_processes():
        held |= {name for name in young if name in files and files[name] not in of_anybody}
    noted = _noted(folder)
    if held - noted:
        with contextlib.suppress(OSError):  # a full disk costs the note, not the run
            (folder / _NOTE).write_text("\n".join(sorted(held | noted)))


def remove_noted(folder: Path) -> None:
    """Removes the shared memory noted in ``folder`` that no process holds any more."""
    noted = _noted(folder)
    if not noted:
        return
    held: set[int] = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            held |= _held_by(pid)
    for name in noted:
        with contextlib.suppress(OSError):
            file = _SHARED_MEMORY / name
            status = file.lstat()
            if status.st_uid == os.getuid() and status.st_ino not in held:
                file.unlink()


def sees_all_processes() -> bool:
    """Returns whether /proc lists all processes of this machine, which it does not in a container."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino == _ALL_PROCESSES
    return False


def _semaphores_since(session: int) -> set[str]:
    """Returns the names of this user's Python semaphores that are younger than a session."""
    with contextlib.suppress(OSError, IndexError):
        # psutil's time of creation may be off by a second: it counts from a rounded time of the boot.
        ticks = int(Path(f"/proc/{session}/stat").read_text().rpartition(")")[2].split()[19])
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        begin = booted + ticks / os.sysconf("SC_CLK_TCK")
        files = [(file, file.lstat()) for file in _SHARED_MEMORY.glob("sem.mp-*")]
        return {f.name for f, s in files if s.st_uid == os.getuid() and s.st_ctime >= begin}
    return set()


def _noted(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        names = (folder / _NOTE).read_text().splitlines()
        return {name for name in names if name and "/" not in name}
    return set()


def _files() -> dict[str, int]:
    with contextlib.suppress(OSError), os.scandir(_SHARED_MEMORY) as entries:
        return {entry.name: entry.inode() for entry in entries}
    return {}


def _held_by(pid: int) -> set[int]:
    """Returns the inodes of a process's mapped shared memory. Names would not do: some are temporary."""
    prefix = f" {_SHARED_MEMORY}/"
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        return {int(line.split()[4]) for line in maps if prefix in line}
