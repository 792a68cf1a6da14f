# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rows as lines, the table at the end, and the JSON line behind it."""

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from check_gpu.row import Row
from torchtitan.grpo.run_folder.start_record import package_versions

NOTE = (
    "The project's continuous integration has no GPU, so it never runs the rows that need one. A "
    "row that failed may be a mistake of the check itself."
)
_MAX_WIDTH = 200
_QUERY_SECONDS = 30
_QUERY = "name,driver_version,memory.used,memory.total,clocks.sm,clocks.max.sm,power.limit"


def lines_of(row: Row) -> list[str]:
    """Returns the line of a row, and its reason below it."""
    bound = f" [{row.bound}]" if row.bound else ""
    line = _line(row, f"{row.check}: {row.case}") + bound
    return [line, *(f"          {part}" for part in row.reason.splitlines())]


def table(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each row, under its check and what the check leaves open."""
    lines = []
    for check, group in groupby(rows, lambda row: row.check):
        found = list(group)
        of_check = found[0].cannot_tell
        lines.append(f"{check}  (cannot tell: {of_check})" if of_check else check)
        for row in found:
            more = [_first_line(row)] if row.status != "failed" else []
            if row.cannot_tell != of_check:
                more.append(f"cannot tell: {row.cannot_tell}")
            line = "; ".join([f"  {_line(row, row.case)}", *filter(None, more)])
            lines.append(line if len(line) <= _MAX_WIDTH else f"{line[: _MAX_WIDTH - 3]}...")
    failed = [row for row in rows if row.status == "failed"]
    lines += [f"{len(failed)} of {len(rows)} rows failed" + (":" if failed else ".")]
    lines += [f"  {row.check}: {row.case}: {_first_line(row)}" for row in failed]
    return lines


def _line(row: Row, name: str) -> str:
    found = [f"{key} {number:.4g}" for key, number in row.figures.items()]
    found += [f"{key} {fact}" for key, fact in row.facts.items() if fact]
    return f"{row.status:8}  {name}  {', '.join(found)}".rstrip()


def _first_line(row: Row) -> str:
    return row.reason.partition("\n")[0]


def machine(commit: str) -> dict[str, str]:
    """Returns what is known without torch: the commit, versions of packages, and the GPUs."""
    facts = {"commit": commit, "python": platform.python_version(), **package_versions()}
    return facts | {f"gpu {number}": line for number, line in enumerate(_nvidia_smi())}


def _nvidia_smi() -> list[str]:
    command = ("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv")
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    names, *lines = result.stdout.splitlines()
    pairs = (zip(names.split(", "), line.split(", "), strict=True) for line in lines)
    return [", ".join(f"{name} {value}" for name, value in pair) for pair in pairs]


def summary(rows: Sequence[Row], device: str, facts: dict[str, str]) -> dict[str, Any]:
    """Returns what the last line of the output holds."""
    return {
        "check_gpu": 1,
        "ok": all(row.status != "failed" for row in rows),
        "device": device,
        "machine": facts,
        "note": NOTE,
        "rows": [asdict(row) for row in rows],
    }
