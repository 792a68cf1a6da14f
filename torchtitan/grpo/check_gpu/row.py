# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What one check reports, and the settings that it gets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["passed", "failed", "measured", "skipped"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        case: What was measured; the check's name precedes it in the table.
        status: ``measured`` has no bound, and ``skipped`` says in ``reason`` what it needs.
        figures: Numbers under names that end in their unit.
        bound: What must hold, in words.
        reason: Why the row failed or was skipped.
        check: Name of the check, which the process that runs it fills in.
    """

    case: str
    status: Status
    figures: dict[str, float] = field(default_factory=dict)
    bound: str = ""
    reason: str = ""
    check: str = ""


@dataclass(frozen=True)
class Settings:
    """Settings of a check.

    Attributes:
        device: ``cuda`` or ``cpu``. On a CPU all sizes are small, and no time has a bound.
        folder: An empty folder of the check's own, which is removed afterwards.
    """

    device: Literal["cuda", "cpu"]
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


def judged(case: str, holds: bool, bound: str, figures: dict[str, float]) -> Row:
    """Returns a row that passes if its bound holds."""
    reason = "" if holds else f"must hold: {bound}"
    return Row(case, "passed" if holds else "failed", figures, bound, reason)
