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

from check_gpu.row import RowsFile, Settings

NO_GPU_STATUS = 3
"""Exit status if the check needs a GPU and torch has none."""


def main(task: dict[str, Any]) -> int:
    """Runs the check and writes each row as soon as it is there; returns the exit status."""
    settings = Settings(task["check"], task["device"], Path(task["folder"]))
    module = importlib.import_module(task["module"])
    if "torch" in sys.modules and not _settle(settings):
        return NO_GPU_STATUS
    rows = RowsFile(Path(task["rows"]))
    for row in module.run(settings):
        open_ends = row.cannot_tell or task["cannot_tell"]
        rows.add(replace(row, check=settings.check, cannot_tell=open_ends))
    return 0


def _settle(settings: Settings) -> bool:
    """Sets CUDA up as a trainer does; returns whether the device of the settings is there."""
    from torchtitan.grpo.system.device import settle_device

    logging.basicConfig(level=logging.INFO)
    return settle_device() == "cuda" or not settings.on_gpu


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
