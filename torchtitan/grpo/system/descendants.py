# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ends what user code has started, wherever it has hidden.

A program that a reward or an environment starts may leave its session and its parent (``setsid``, ``nohup``,
a double fork), so that no signal to a session reaches it. On Linux, the kernel then makes it a child of the
process that has called :func:`adopt_orphans`, among whose descendants it is found. If that process
was killed, the program is found by ``RUN_VARIABLE`` in its environment. Other systems have neither.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torchtitan.grpo.system.environment import RUN_VARIABLE

_PR_SET_CHILD_SUBREAPER = 36
_REAP_SECONDS = 1.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.01

own_children: set[int] = set()
"""Children in other sessions for whose status those ask who have started them."""


def adopt_orphans() -> None:
    """Makes this process the parent of descendants that lose theirs. Does nothing on other systems.

    A thread asks for the exit status of those that end, which would otherwise stay zombies.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        threading.Thread(target=_reap_orphans, name="orphan-reaper", daemon=True).start()


def end_descendants() -> None:
    """Kills all descendants of this process."""
    own = os.getpid()
    _kill_all(lambda: _descendants_of(own))


def end_marked(mark: str) -> None:
    """Kills all processes of this user that were started with this ``RUN_VARIABLE``."""
    wanted = f"{RUN_VARIABLE}={mark}".encode()
    _kill_all(lambda: [pid for pid, _ in _processes() if wanted in _environment(pid).split(b"\0")])


def _kill_all(find: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while (found := find()) and time.monotonic() < deadline:  # what is killed may just have forked
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # not a child of this process, or not ended yet
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_SECONDS)


def _reap_orphans() -> None:
    """Reaps children that are strangers here: those of another session that stay zombies.

    asyncio asks for the status of its children as soon as they have ended.
    """
    own, seen = os.getpid(), set[int]()
    while True:
        zombies = set[int]()
        if _any_has_ended():  # else it is in vain to look at all processes of a large machine
            zombies = {
                pid
                for pid, (state, parent, session) in _processes()
                if parent == own and state == "Z" and session != os.getsid(0)
            }
        for pid in zombies & seen - own_children:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        seen = zombies
        time.sleep(_REAP_SECONDS)


def _any_has_ended() -> bool:
    """Returns whether a child has ended for whose status nobody has asked yet."""
    with contextlib.suppress(ChildProcessError):  # there are no children
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _descendants_of(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (_, parent, _) in _processes():
        children.setdefault(parent, []).append(pid)
    found, waiting = [], [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _processes() -> Iterator[tuple[int, tuple[str, int, int]]]:
    """Yields the processes of this machine, with state, parent and session; none without /proc."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            yield int(entry.name), (words[0], int(words[1]), int(words[3]))


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""
