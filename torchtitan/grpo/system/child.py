# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Child processes that cannot outlive their owner.

Every child is started in a session of its own, so that a Ctrl-C in the terminal reaches
its owner alone, which then ends it in order; and on Linux the kernel sends it SIGTERM
when the owner dies without having done so.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: the hook below may not import or allocate much.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_RANK_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what torchrun told this process about its own rank.

    A child that is no training rank would take it for its own.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }


def die_with_parent() -> None:
    """Asks the kernel to end this process when its parent's starting thread ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start_child(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    log_file: Path | None = None,
    cwd: str | None = None,
) -> subprocess.Popen:
    """Starts ``command``; its output goes to ``log_file``, or to ours where None.

    Call it from a thread that lives as long as the child should (see
    :func:`die_with_parent`).
    """
    output = open(log_file, "ab") if log_file is not None else None  # noqa: SIM115
    try:
        return subprocess.Popen(
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


def stop_children(children: Sequence[subprocess.Popen], grace_seconds: float = 3.0) -> None:
    """Ends the children with everything in their sessions: SIGTERM, then SIGKILL."""
    for child in children:
        _signal_session(child, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        # Also after a clean exit: a server's own workers may have stayed behind.
        _signal_session(child, signal.SIGKILL)
        child.wait(timeout=10)


def _signal_session(child: subprocess.Popen, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)
