# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process of one check: ``child.py NAME MODULE DEVICE FOLDER``, started by `owner.py`."""

import importlib
import os
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from torchtitan.grpo import strict_json
from torchtitan.grpo.check_gpu.owner import ROWS_FILE
from torchtitan.grpo.check_gpu.row import Settings


def main(arguments: list[str]) -> int:
    """Runs the check and writes each row as soon as it is there; returns the exit status."""
    name, module, device, folder = arguments
    if device not in ("cuda", "cpu"):
        raise ValueError(f"The device must be 'cuda' or 'cpu', got {device!r}.")
    settings = Settings(device, Path(folder) / "work")
    with (Path(folder) / ROWS_FILE).open("a") as file:
        for row in importlib.import_module(module).run(settings):
            file.write(strict_json.dumps(asdict(replace(row, check=name))) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A kernel that is still running, or a thread that waits for it, must not hold the exit.
    os._exit(status)
