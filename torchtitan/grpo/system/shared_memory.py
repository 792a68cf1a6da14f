# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Notes the files in shared memory that processes hold, and removes those that no process holds.

Programs such as SGLang leave such files behind when they are killed, and some also when they end.
The names are random, so the process that starts such a program notes them while it runs; see
:func:`note_held`.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path("/dev/shm")
_NOTE = "shared_memory"
# The kernel gives the first PID namespace, whose /proc lists all processes, this inode
# (PROC_PID_INIT_INO in include/linux/proc_ns.h).
_ALL_PROCESSES = 0xEFFFFFFC


def note_held(session: int, folder: Path) -> None:
    """Notes in ``folder`` the files that the processes of a session hold now, beside earlier ones.

    Semaphores of Python that nobody holds and that are younger than the session are noted as well: vLLM
    and SGLang leave some that they hold no longer. If one is another program's, it is not needed either.
    A process in a container cannot know that, because the processes of other containers that share the
    memory are not visible to it. It therefore leaves such semaphores where they are.
    """
    # The files are listed before the processes, so that a file that is made meanwhile is not noted.
    files, young = _files(), _semaphores_since(session)
    of_session: set[int] = set()
    of_anybody: set[int] = set()
    for pid in _processes():
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
    """Removes the files noted in ``folder`` that no process holds any more."""
    noted = _noted(folder)
    if not noted:
        return
    held: set[int] = set()
    for pid in _processes():
        with contextlib.suppress(OSError):
            held |= _held_by(pid)
    for name in noted:
        with contextlib.suppress(OSError):
            file = _FOLDER / name
            status = file.lstat()
            if status.st_uid == os.getuid() and status.st_ino not in held:
                file.unlink()


def sees_all_processes() -> bool:
    """Returns whether /proc lists all processes of this machine: not in a container."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino == _ALL_PROCESSES
    return False


def _semaphores_since(session: int) -> set[str]:
    """Returns this user's semaphores of Python that were made after a session's first process."""
    with contextlib.suppress(OSError, IndexError):
        ticks = int(Path(f"/proc/{session}/stat").read_text().rpartition(")")[2].split()[19])
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        begin = booted + ticks / os.sysconf("SC_CLK_TCK")
        files = [(file, file.lstat()) for file in _FOLDER.glob("sem.mp-*")]
        return {f.name for f, s in files if s.st_uid == os.getuid() and s.st_ctime >= begin}
    return set()


def _noted(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        names = (folder / _NOTE).read_text().splitlines()
        return {name for name in names if name and "/" not in name}
    return set()


def _processes() -> Iterable[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def _files() -> dict[str, int]:
    """Returns the inodes of the files in shared memory by their names."""
    with contextlib.suppress(OSError), os.scandir(_FOLDER) as entries:
        return {entry.name: entry.inode() for entry in entries}
    return {}


def _held_by(pid: int) -> set[int]:
    """Returns the inodes of the files in shared memory that a process has mapped.

    Inodes are compared because a process that makes a semaphore maps it under a temporary name, which
    is removed when the file gets its final name.
    """
    prefix = f" {_FOLDER}/"
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        return {int(line.split()[4]) for line in maps if prefix in line}
