# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What one check reports, the settings that it gets, and the file that keeps all rows."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtitan.grpo.system import strict_json

Status = Literal["passed", "failed", "measured", "skipped", "cut", "two GPUs"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        case: What was measured; the check's name precedes it in the table.
        status: ``measured`` has no bound, ``skipped`` says in ``reason`` what it needs, ``cut`` ran
            out of the time that was left, and ``two GPUs`` can be told by no machine with one.
        figures: Numbers under names that end in their unit.
        bound: What must hold, in words.
        reason: Why the row failed or was skipped.
        check: Name of the check, which the process that runs it fills in.
        cannot_tell: What the row leaves open; that of the check unless it has its own.
        facts: What was found besides numbers, by name.
    """

    case: str
    status: Status
    figures: dict[str, float] = field(default_factory=dict)
    bound: str = ""
    reason: str = ""
    check: str = ""
    cannot_tell: str = ""
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """Settings of a check.

    Attributes:
        check: Name of the check.
        device: ``cuda`` or ``cpu``. On a CPU all sizes are small, and no time has a bound.
        folder: An empty folder of the check's own, which is removed afterwards.
    """

    check: str
    device: Literal["cuda", "cpu"]
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


def judged(case: str, holds: bool, bound: str, figures: dict[str, float], **more: Any) -> Row:
    """Returns a row that passes if its bound holds, with ``more`` fields."""
    reason = "" if holds else f"must hold: {bound}"
    return Row(case, "passed" if holds else "failed", figures, bound, reason, **more)


class RowsFile:
    """Rows as JSON lines, which outlive every process that writes them.

    The command and the process of its check write one after the other.

    Args:
        path: The file; rows that it has already stay there and are not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_read = path.stat().st_size if path.exists() else 0

    def add(self, row: Row) -> None:
        """Writes a row."""
        with self.path.open("a") as file:
            file.write(strict_json.dumps(asdict(row)) + "\n")

    def new(self) -> list[Row]:
        """Returns the rows since the last call that are whole: a writer may have been killed."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._num_read)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._num_read += sum(map(len, whole))
        return [Row(**json.loads(line)) for line in whole]
