# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs each check in a child process with a time limit, whatever the check does.

The child appends its rows to the rows file as soon as it has them, and this process passes them on.
A crash, a hang or a mistake therefore costs the rest of that check alone, and becomes a row. This
process does not import torch, which would take seconds of the time that the checks have.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from check_gpu.child import NO_GPU_STATUS
from check_gpu.row import Row, RowsFile
from check_gpu.table import Check
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

_BENCHMARKS = Path(__file__).resolve().parents[1]
_CHILD = "check_gpu.child"
_TAIL_LINES = 15
_LOOK_SECONDS = 0.1
# For ending a check and for the table.
_RESERVED_SECONDS = 4.0


@dataclass
class Owner:
    """Runs checks until a deadline.

    Attributes:
        device: ``cuda`` or ``cpu``.
        output: Folder for the rows file and the output of each check.
        deadline: When everything must have ended, by the monotonic clock.
        environment: Environment of the checks besides this process's.
    """

    device: str
    output: Path
    deadline: float
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = RowsFile(self.output / "rows.jsonl")

    def run(self, check: Check) -> Iterator[Row]:
        """Yields the rows of a check as they come, and one more if it did not end in order.

        Raises:
            ConfigError: If the check needs a GPU and torch has none.
        """
        left = self.deadline - time.monotonic() - _RESERVED_SECONDS
        if self.device == "cpu" and not check.on_cpu:
            yield from self._add(check, Row("the whole check", "skipped", reason="It needs a GPU."))
        elif left < check.needs_seconds:
            reason = f"{max(left, 0):.0f} s left, needs {check.needs_seconds:g} s"
            yield from self._add(check, Row("the whole check", "skipped", reason=reason))
        else:
            yield from self._run(check, min(left, check.limit_seconds))

    def _run(self, check: Check, limit_seconds: float) -> Iterator[Row]:
        log, began, num_rows = self.output / f"{check.name}.log", time.monotonic(), 0
        log.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix="check-gpu-", ignore_cleanup_errors=True) as folder:
            child = self._start(check, folder, log)
            reason, is_late = "", False
            try:
                while child.poll() is None and not is_late:
                    is_late = time.monotonic() - began > limit_seconds
                    time.sleep(_LOOK_SECONDS)
                    for row in self._rows.new():
                        num_rows += 1
                        yield row
            finally:
                reason = _end(child)
        rows = self._rows.new()
        yield from rows
        status = None if is_late else child.returncode
        if status == NO_GPU_STATUS:
            raise ConfigError(
                "check-gpu needs a GPU that torch can use, and none is visible. Install a torch "
                "with CUDA and set CUDA_VISIBLE_DEVICES, or try the command with --device cpu."
            )
        reason = reason or _describe(status, limit_seconds, log, has_rows=num_rows + len(rows) > 0)
        if reason:
            word = "cut" if is_late and limit_seconds < check.limit_seconds else "failed"
            seconds = {"seconds": round(time.monotonic() - began, 1)}
            yield from self._add(check, Row("the whole check", word, seconds, "", reason))

    def _start(self, check: Check, folder: str, log: Path) -> subprocess.Popen:
        task = {
            "check": check.name, "module": check.module, "device": self.device, "folder": folder,
            "rows": str(self._rows.path.resolve()), "cannot_tell": check.cannot_tell,
        }  # fmt: skip
        folders = [str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        path = {"PYTHONPATH": os.pathsep.join(folders)}
        environment = os.environ | path | self.environment | dict(check.environment)
        return start_child(
            [*LIGHT_PYTHON, _CHILD, strict_json.dumps(task)], env=environment, log_file=log
        )

    def _add(self, check: Check, row: Row) -> list[Row]:
        self._rows.add(Row(**{**vars(row), "check": check.name, "cannot_tell": check.cannot_tell}))
        return self._rows.new()


def _end(child: subprocess.Popen) -> str:
    """Ends the child's whole session; returns why that was not possible."""
    try:
        stop_children([child])
    except subprocess.TimeoutExpired:
        return (
            f"Process {child.pid} must end when it is killed, but the driver still holds it. "
            "Look into `dmesg` and `nvidia-smi`."
        )
    return ""


def _describe(status: int | None, limit_seconds: float, log: Path, *, has_rows: bool) -> str:
    if status == 0 and has_rows:
        return ""
    output = log.read_text(errors="replace").splitlines() if log.exists() else []
    tail = "\n".join(output[-_TAIL_LINES:])
    if status is None:
        what = f"The check must end within {limit_seconds:.0f} s and was ended."
    elif status < 0:
        what = f"The check's process was ended by signal {-status}."
    elif status > 0:
        what = f"The check's process ended with exit status {status}."
    else:
        what = "The check must report at least one row and reported none."
    return f"{what} The end of its output:\n{tail}" if tail else what
