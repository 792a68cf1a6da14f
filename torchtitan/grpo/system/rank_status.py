# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Phase and last completed step of a training rank, for whichever process reports the rank's end.

A file beside the rank's error file holds the same for torchrun's agent. It is up to date even after a kill.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

STATUS_FILE = "rank_status.json"
REPORTED_FILE = "lost_rank_reported"
"""File in the folder of an agent's attempt: a lost rank has been reported."""
_FILE_BYTES = 512


class Status(msgspec.Struct, frozen=True):
    rank: int
    host: str
    pid: int
    phase: str = "starting"
    completed: int = 0

    def describe(self) -> str:
        return (
            f"in step {self.completed + 1}, phase: {self.phase}; the last completed step is "
            f"{self.completed}"
        )


class LostRank(msgspec.Struct, frozen=True):
    """A rank that is lost, with its last status.

    ``silent_seconds`` is 0 if its connection closed. ``has_reported``: the rank has reported its own failure.
    """

    status: Status
    silent_seconds: float = 0.0
    has_reported: bool = False


class StatusBoard:
    """This rank's status. The training thread changes it, which calls ``on_change``. Other threads read it."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self.current = Status(int(os.environ.get("RANK", "0")), socket.gethostname(), os.getpid())
        self._file: int | None = None
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            path = Path(error_file).with_name(STATUS_FILE)
            with suppress(OSError):  # the agent has ended and removed its folder
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._write()

    def enter(self, phase: str) -> None:
        if phase != self.current.phase:
            self._change(msgspec.structs.replace(self.current, phase=phase))

    def complete(self, step: int) -> None:
        if step != self.current.completed:
            self._change(msgspec.structs.replace(self.current, completed=step))

    def _change(self, status: Status) -> None:
        self.current = status
        self._write()
        self._on_change()

    def _write(self) -> None:
        with self._lock:
            if self._file is not None:
                os.pwrite(self._file, msgspec.json.encode(self.current).ljust(_FILE_BYTES), 0)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None


def claims_report(lost_rank: int) -> bool:
    """Returns whether this process shall report the loss of a rank: the first of its host that asks."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return int(os.environ.get("RANK", "0")) == (1 if lost_rank == 0 else 0)
    try:
        # The ranks of an attempt have a folder each in that of the attempt.
        (Path(file).parent.parent / REPORTED_FILE).open("x").close()
    except OSError as error:  # without the agent's folder, twice is better than never
        return not isinstance(error, FileExistsError)
    return True


def read_status(folder: Path) -> Status | None:
    try:
        return msgspec.json.decode((folder / STATUS_FILE).read_bytes(), type=Status)
    except (OSError, msgspec.DecodeError):
        return None
