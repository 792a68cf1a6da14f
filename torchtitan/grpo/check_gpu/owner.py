# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs each check in a child process with a time limit, whatever the check does.

The child appends its rows to a file, one JSON object in a line, as soon as it has them. A crash, a
hang or a mistake therefore costs the rest of that check alone, and becomes a row that failed.
"""

import json
import subprocess
import tempfile
import time
from pathlib import Path

from torchtitan.grpo.check_gpu.row import Row
from torchtitan.grpo.check_gpu.table import Check
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

ROWS_FILE = "rows.jsonl"
_CHILD = "torchtitan.grpo.check_gpu.child"
_TAIL_LINES = 15


def run_check(check: Check, device: str) -> list[Row]:
    """Runs one check in a process of its own; returns its rows, and one more if it failed."""
    with tempfile.TemporaryDirectory(prefix="check-gpu-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "work").mkdir()
        log = folder / "output.log"
        began = time.monotonic()
        child = start_child(
            [*LIGHT_PYTHON, _CHILD, check.name, check.module, device, name], log_file=log
        )
        try:
            status: int | None = child.wait(check.limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            reason = _end(child)
        rows = _read_rows(folder / ROWS_FILE, check.name)
        failure = reason or _describe(status, check, log, has_rows=bool(rows))
        if failure:
            seconds = {"seconds": round(time.monotonic() - began, 1)}
            rows.append(Row("the whole check", "failed", seconds, "", failure, check.name))
        return rows


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


def _describe(status: int | None, check: Check, log: Path, *, has_rows: bool) -> str:
    if status == 0 and has_rows:
        return ""
    output = log.read_text(errors="replace").splitlines() if log.exists() else []
    tail = "\n".join(output[-_TAIL_LINES:])
    if status is None:
        what = f"The check must end within {check.limit_seconds:g} s and was ended."
    elif status < 0:
        what = f"The check's process was ended by signal {-status}."
    elif status > 0:
        what = f"The check's process ended with exit status {status}."
    else:
        what = "The check must report at least one row and reported none."
    return f"{what} The end of its output:\n{tail}" if tail else what


def _read_rows(file: Path, name: str) -> list[Row]:
    """Returns the rows that were written whole; a process may be killed while it writes."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(Row(**{**json.loads(line), "check": name}))
    return rows
