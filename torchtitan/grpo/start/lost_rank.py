# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ends a run in which a rank is lost: prints one message, records collectives, and ends within a bound.

The first rank of a host to claim the report prints it. Each rank dumps torch's flight recorder. The
training thread may be in a collective that never returns, so another thread ends the process.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.system.rank_status import LostRank, claims_report

# Time for the training thread to close what it can after the loss.
_CLOSE_SECONDS = 6.0


class LostRankHandler:
    """Reports a lost rank and ends this process soon. Does nothing while ``is_stopping`` returns True."""

    def __init__(self, config: JobConfig, is_stopping: Callable[[], bool]) -> None:
        self._config, self._is_stopping = config, is_stopping

    def __call__(self, lost: LostRank) -> None:
        """Handles the loss of a rank, on the thread of the `RankChannel`."""
        if self._is_stopping():
            return  # the stop has a bound and a message of its own
        is_here = lost.status.host == socket.gethostname()
        if not (lost.has_reported and is_here) and claims_report(lost.status.rank):
            print(f"error: {describe_lost(lost, self._config)}", file=sys.stderr, flush=True)
        # Started first: nothing that the recorder does may keep this process from ending.
        threading.Thread(target=_end_soon, name="lost-rank-end", daemon=True).start()
        dump_collectives()


def _end_soon() -> None:
    time.sleep(_CLOSE_SECONDS)
    sys.stderr.flush()
    os._exit(1)


def describe_lost(lost: LostRank, config: JobConfig) -> str:
    status = lost.status
    how = "died"
    if lost.has_reported:
        how = "failed, for a reason that is printed on its host,"
    elif lost.silent_seconds:
        how = (
            f"gave no sign of life for {lost.silent_seconds:.0f} s (its host is gone or the process "
            "is frozen; the bound is grpo.lost_rank_seconds)"
        )
    text = (
        f"Training rank {status.rank} on {status.host} (process {status.pid}) {how} "
        f"{status.describe()}. "
    )
    if trace := _trace_file():
        text += f"What the collectives of the other ranks were doing is in {trace}*. "
    return text + describe_next(config)


def describe_next(config: JobConfig) -> str:
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
    begin = "from the newest checkpoint" if config.checkpoint.enable else (
        "with step 1, because checkpoint.enable is false"
    )  # fmt: skip
    if number <= most:
        return f"The ranks are started again, {begin} (restart {number} of {most}, --max-restarts)."
    if most:
        return f"No restart is left (--max-restarts {most}). A new start begins {begin}."
    return f"A new start begins {begin}; --max-restarts N lets torchrun do so by itself."


def _trace_file() -> str | None:
    """Prefix of the names of the flight recorder's files, or None if the recorder is off."""
    if int(os.environ.get("TORCH_FR_BUFFER_SIZE", "0") or 0) <= 0:
        return None
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE")


def dump_collectives() -> None:
    prefix = _trace_file()
    if prefix is None:
        return
    try:
        trace = dump_flight_recorder()
        Path(f"{prefix}{os.environ.get('RANK', '0')}").write_bytes(trace)
    except (OSError, RuntimeError) as error:
        if not isinstance(error, FileNotFoundError):  # that the folder is gone is told already
            print(f"The collectives could not be recorded: {error}", file=sys.stderr, flush=True)


def dump_flight_recorder() -> bytes:
    """Returns the recorded collectives: NCCL's, or gloo's in a build without NCCL's recorder."""
    module: Any = _distributed_c10d  # its stubs do not know the recorder
    dump = getattr(module, "_dump_nccl_trace", None) or module._dump_fr_trace
    return dump()
