# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lets one rank of each host do what all of them need, before any process group exists.

The ranks of a host share a parent, torchrun's agent, and the temporary folder. The first of them
writes its answer to a file there that is named after the parent, and the others wait for the file.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.grpo.system.process_identity import start_time

_POLL_SECONDS = 0.1
_STALE_SECONDS = 24 * 3600.0


def once_per_host(name: str, make: Callable[[], dict[str, Any]], timeout_seconds: float) -> Any:
    """Returns what ``make`` returns on the first rank of this host.

    Args:
        name: What is made. All ranks must call with the same names.
        make: Called on the first rank of each host. Its result must be JSON, and it must not raise:
            the other ranks would wait for nothing.
        timeout_seconds: Maximum time that the other ranks wait.

    Raises:
        TimeoutError: If the first rank has not answered in time, or torchrun has ended.
        RuntimeError: If the folder for the answers belongs to another user.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return make()
    file = _answer_file(name)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        answer = make()
        _write(file, answer)
        return answer
    return _wait_for(file, name, timeout_seconds)


def _answer_file(name: str) -> Path:
    parent = os.getppid()
    run = (os.environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT"))
    identity = "|".join([str(parent), start_time(parent), *run, name])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return _own_folder() / f"{digest}.json"


def _own_folder() -> Path:
    """Returns a folder in the temporary folder that nobody else can write to.

    Raises:
        RuntimeError: If somebody else has made it before.
    """
    folder = Path(tempfile.gettempdir()) / f"torchtitan-grpo-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat().st_uid
    if owner != os.getuid():
        raise RuntimeError(
            f"{folder} must belong to the user who trains (uid {os.getuid()}), but it belongs to uid "
            f"{owner}. Remove it, or set TMPDIR to a folder of your own."
        )
    return folder


def _write(file: Path, answer: dict[str, Any]) -> None:
    for old in file.parent.glob("*.json"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                old.unlink()
    # Renamed as a whole, so that nobody reads half of it.
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(answer, allow_nan=False))
    part.replace(file)


def _wait_for(file: Path, name: str, timeout_seconds: float) -> Any:
    parent, deadline = os.getppid(), time.monotonic() + timeout_seconds
    while not file.exists():
        if os.getppid() != parent:
            raise TimeoutError(f"torchrun ended while this rank waited for {name}.")
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"The first rank of this host did not finish {name} within {timeout_seconds:g} s."
            )
        time.sleep(_POLL_SECONDS)
    return json.loads(file.read_text())
