# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Child processes that cannot outlive their owner.

Every child is started in a session of its own, so that Ctrl-C in the terminal reaches only its
owner, which then ends the child in order. If the owner dies before it has done so, the kernel sends
the child SIGTERM (on Linux).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from torchtitan.grpo.system.descendants import own_children
from torchtitan.grpo.system.log_limit import log_limit

_PR_SET_PDEATHSIG = 1
# Loaded before any fork, because the hook below should import and allocate as little as possible.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

# Python starts one such process for each program that shares memory between its processes.
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_SECONDS = 3.0


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Makes the kernel send a signal to this process when the thread that started it ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signum)


def start_child(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    log_file: Path | None = None,
    cwd: str | None = None,
) -> subprocess.Popen:
    """Starts ``command`` as a child that ends with this process.

    Call it from a thread that lives as long as the child should, see :func:`die_with_parent`.

    Args:
        command: Program and arguments.
        env: Environment of the child; ``None`` inherits this process's.
        log_file: File to which the child's output is appended, for this user alone and within the
            size of `log_limit.py`; ``None`` leaves the output where this process's goes.
        cwd: Working directory of the child; ``None`` inherits this process's.
    """
    output = open_log(log_file) if log_file is not None else None
    try:
        child = subprocess.Popen(
            list(command),
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    finally:
        if output is not None:
            output.close()
    own_children.add(child.pid)
    if log_file is not None:
        log_limit.add(child.pid, log_file)
    return child


def open_log(path: Path) -> IO[bytes]:
    """Opens a log for appending that no other user can read: logs show prompts and settings."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.fchmod(descriptor, 0o600)  # an earlier program may have made the file
    return open(descriptor, "ab")


def stop_children(children: Sequence[subprocess.Popen], grace_seconds: float = 3.0) -> None:
    """Ends the children, and all processes in their sessions.

    Python's trackers of shared memory in these sessions are ended last. Once all other processes of
    their program have ended, they remove the shared memory that those have left, and end themselves.

    Args:
        children: Processes from :func:`start_child`. They may have ended already.
        grace_seconds: Time between SIGTERM and SIGKILL, for all children together.
    """
    for child in children:
        _signal_session(child, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        # Sent also after a clean exit, because a server's own workers may still be running.
        trackers = _kill_all_but_trackers(child)
        child.wait(timeout=10)
        _wait_for_end(trackers, _TRACKER_SECONDS)
        _signal_session(child, signal.SIGKILL)
        own_children.discard(child.pid)
        log_limit.remove(child.pid)


def _signal_session(child: subprocess.Popen, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)


def _kill_all_but_trackers(child: subprocess.Popen) -> list[int]:
    """Kills the processes of a child's session; returns the trackers, which are left running."""
    if not Path("/proc/self/stat").exists():  # nothing tells which processes are trackers
        _signal_session(child, signal.SIGKILL)
    trackers: list[int] = []
    for pid in _members(child.pid):
        with contextlib.suppress(OSError):
            if _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes():
                trackers.append(pid)
            else:
                os.kill(pid, signal.SIGKILL)
    return trackers


def _members(session: int) -> list[int]:
    """Returns the processes of a session; none on systems without /proc."""
    members: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == session:
                members.append(int(entry.name))
    return members


def _wait_for_end(pids: Sequence[int], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"  # its parent has not asked for its status yet
