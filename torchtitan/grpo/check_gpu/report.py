# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The table, and what has to be known about the machine in order to read it."""

import contextlib
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan.grpo.check_gpu.row import Row

NOTE = (
    "The rows of the GPU are not run by the project's continuous integration, which has no GPU. A "
    "row that failed may be a mistake of the check itself."
)
_QUERY_SECONDS = 30


def machine() -> dict[str, Any]:
    """Returns versions of torch, CUDA, NCCL and driver, the names of the GPUs, and the commit."""
    import torch
    from torch.cuda import nccl

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "gpus": [],
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
        with contextlib.suppress(AttributeError, RuntimeError):  # a build without NCCL
            facts["nccl"] = ".".join(map(str, nccl.version()))
    return facts


def _commit() -> str | None:
    folder = str(Path(__file__).resolve().parent)
    commit = _first_line("git", "-C", folder, "rev-parse", "HEAD")
    changes = _first_line("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if commit and changes else commit


def _first_line(*command: str) -> str | None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(result.stdout.splitlines()), None)


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Returns the table: a line for each row, and the reason below a row that has one."""
    width = max((len(f"{row.check}: {row.case}") for row in rows), default=0)
    lines = []
    for row in rows:
        figures = ", ".join(f"{name} {number:.6g}" for name, number in row.figures.items())
        bound = f" [{row.bound}]" if row.bound else ""
        lines.append(f"{row.status:8}  {f'{row.check}: {row.case}':{width}}  {figures}{bound}")
        lines += [f"          {line}" for line in row.reason.splitlines()]
    return lines


def summary(rows: Sequence[Row], device: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns what the last line of the output holds."""
    return {
        "check_gpu": 1,
        "ok": all(row.status != "failed" for row in rows),
        "device": device,
        "machine": facts,
        "note": NOTE,
        "rows": [asdict(row) for row in rows],
    }
