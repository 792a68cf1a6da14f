# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts child processes. Neither they nor the processes that they start can outlive their owner.

Every child has its own session, so Ctrl-C reaches only its owner, which shuts the child down. If the owner
dies first, the kernel sends the child SIGTERM (on Linux). A program that leaves session and parent
(``setsid``, a double fork) becomes a child of the process that called :func:`adopt_orphans` (on
Linux). If that process was killed, the program is found by ``RUN_VARIABLE`` in its environment.
"""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from torchtitan.grpo.system.environment import RUN_VARIABLE
from torchtitan.grpo.system.log_limit import log_limit

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_BEGIN = str(Path(__file__).with_name("child_begin.py"))
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

# Python starts one such process for each program that shares memory between its processes.
_TRACKER = "multiprocessing.resource_tracker"
_TRACKER_SECONDS = 3.0
_REAP_SECONDS = 1.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.01
_PARENT_POLL_SECONDS = 0.5
_PARENT_GRACE_SECONDS = 5.0

_own_children: set[int] = set()
"""Children of :func:`start_child`, whose status their owners ask for."""
_watches_parent = threading.Lock()


def die_with_parent() -> None:
    """Makes the kernel send SIGTERM to this process when the thread that started it ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with_parent() -> None:
    """Starts a thread that ends this process soon after its parent process has ended."""
    if _watches_parent.acquire(blocking=False):
        watch = threading.Thread(
            target=_watch_parent, args=(os.getppid(),), name="parent-watch", daemon=True
        )
        watch.start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PARENT_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def child_command(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    signum: int = signal.SIGTERM,
    limits: Mapping[int, tuple[int, int]] | None = None,
) -> list[str]:
    """Wraps a command so that it gets the signal ``signum`` when the thread that starts it ends.

    ``limits`` maps resources to their soft and hard limits. Raises OSError if the program is not in the
    ``PATH`` of ``env``.
    """
    path = (os.environ if env is None else env).get("PATH")
    if shutil.which(command[0], path=path) is None:
        code = errno.EACCES if os.path.exists(command[0]) else errno.ENOENT
        raise OSError(code, os.strerror(code), command[0])
    told = [str(os.getpid()), str(int(signum)), json.dumps(dict(limits or {}), allow_nan=False)]
    return [sys.executable, "-I", "-S", _BEGIN, *told, *command]


def start_child(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    log_file: Path | None = None,
    cwd: str | None = None,
) -> subprocess.Popen:
    """Starts a child that ends with the calling thread; see :func:`die_with_parent`.

    The child's output is appended to ``log_file``, which only this user can read and whose size is
    limited. Without ``log_file``, the output goes where this process's output goes.
    """
    with contextlib.nullcontext() if log_file is None else open_log(log_file) as output:
        child = subprocess.Popen(
            child_command(command, env),
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
        )
    _own_children.add(child.pid)
    if log_file is not None:
        log_limit.add(child.pid, log_file)
    return child


def open_log(path: Path) -> IO[bytes]:
    """Opens a log for appending that no other user can read, because it shows prompts and settings."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.fchmod(descriptor, 0o600)  # an earlier program may have made the file
    return open(descriptor, "ab")


def stop_children(children: Sequence[subprocess.Popen], grace_seconds: float = 3.0) -> None:
    """Sends SIGTERM to the sessions of all children, and SIGKILL when ``grace_seconds`` have passed.

    Python's resource trackers are killed last, because they remove shared memory that others left behind.
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
        psutil.wait_procs(trackers, _TRACKER_SECONDS)
        _signal_session(child, signal.SIGKILL)
        _own_children.discard(child.pid)
        log_limit.remove(child.pid)


def _signal_session(child: subprocess.Popen, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)


def _kill_all_but_trackers(child: subprocess.Popen) -> list[psutil.Process]:
    """Kills the processes of a child's session. Returns Python's resource trackers, which it spares."""
    trackers: list[psutil.Process] = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) != child.pid:
                continue
            process = psutil.Process(pid)
            if any(_TRACKER in argument for argument in process.cmdline()):
                trackers.append(process)
            else:
                os.kill(pid, signal.SIGKILL)
    return trackers


def describe_status(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        return f"exit status {status}"
    cause = ", as the kernel ends processes if the memory is used up" if name == "SIGKILL" else ""
    return f"exit status {status} ({name}{cause})"


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent has ended (on Linux), and reaps them."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        threading.Thread(target=_reap_orphans, name="orphan-reaper", daemon=True).start()


def end_descendants() -> None:
    own = psutil.Process()
    _kill_all(lambda: [child.pid for child in own.children(recursive=True)])


def end_marked(mark: str) -> None:
    """Kills all processes of this user that have the value ``mark`` of ``RUN_VARIABLE``."""
    _kill_all(
        lambda: [
            process.pid
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get(RUN_VARIABLE) == mark
        ]
    )


def _kill_all(find: Callable[[], Iterable[int]]) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while (found := find()) and time.monotonic() < deadline:  # what is killed may just have forked
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # not a child of this process, or not ended yet
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_SECONDS)


def _reap_orphans() -> None:
    """Reaps adopted zombies, which are those of other sessions. asyncio reaps its own children."""
    seen = set[int]()
    while True:
        # Without the first question, it would look at all processes of a large machine each time.
        zombies = set(_zombies_of_other_sessions()) if _any_has_ended() else set()
        for pid in zombies & seen - _own_children:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        seen = zombies
        time.sleep(_REAP_SECONDS)


def _any_has_ended() -> bool:
    with contextlib.suppress(ChildProcessError):  # there are no children
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _zombies_of_other_sessions() -> Iterable[int]:
    for child in psutil.Process().children():
        with contextlib.suppress(OSError, psutil.Error):
            is_zombie = child.status() == psutil.STATUS_ZOMBIE
            if is_zombie and os.getsid(child.pid) != os.getsid(0):
                yield child.pid
