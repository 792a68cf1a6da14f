# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process of one check, started by `owner.py` with one JSON object as its argument."""

import importlib
import json
import logging
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.grpo.check_gpu.row import RowsFile, Settings

NO_GPU_STATUS = 3
"""Exit status if the check needs a GPU and torch has none."""


def main(task: dict[str, Any]) -> int:
    """Runs the check and writes each row as soon as it is there; returns the exit status."""
    settings = Settings(task["check"], task["device"], Path(task["folder"]))
    from torchtitan.grpo.system.device import settle_device

    # As in a trainer: it also settles how many queues CUDA has, and when it loads kernels.
    found = settle_device()
    if settings.device == "cuda" and found != "cuda":
        return NO_GPU_STATUS
    logging.basicConfig(level=logging.INFO)
    rows = RowsFile(Path(task["rows"]))
    for row in importlib.import_module(task["module"]).run(settings):
        open_ends = row.cannot_tell or task["cannot_tell"]
        rows.add(replace(row, check=settings.check, cannot_tell=open_ends))
    return 0


if __name__ == "__main__":
    try:
        status = main(json.loads(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A kernel that is still running, or a thread that waits for it, must not hold the exit.
    os._exit(status)
