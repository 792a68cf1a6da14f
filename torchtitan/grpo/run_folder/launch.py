# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tells a start by the user from a restart of the ranks by torchrun.

torchrun starts the ranks again with the same command line if one of them dies (``--max-restarts``)
or if a node joins. Such a restart must go on with the run: ``job.overwrite`` would remove it. The
number of restarts does not tell, because an agent that joins later counts its own. All starts by one
torchrun have the same rendezvous id, however, and each start records it.
"""

import json
import os
from pathlib import Path
from typing import Any

from torchtitan.grpo.run_folder.contents import STARTS_FOLDER

ENVIRONMENT_FILE = "environment.json"


def launch_id() -> str | None:
    """Returns the rendezvous id of the torchrun that started this rank, or None without one."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    # "none" is what a static rendezvous has where the user gave no id.
    return run_id if run_id and run_id != "none" else None


def is_restart(dump_folder: str) -> bool:
    """Whether the newest start that is recorded in a folder was by the same torchrun."""
    last = _last_start(Path(dump_folder) / STARTS_FOLDER)
    launch = launch_id()
    if launch is None:  # the agents of a static rendezvous stay the same ones, and count alike
        return last is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return last is not None and last.get("launch") == launch


def _last_start(starts: Path) -> dict[str, Any] | None:
    numbers = [int(path.name) for path in starts.glob("[0-9]*") if path.name.isdecimal()]
    if not numbers:
        return None
    try:
        return json.loads((starts / str(max(numbers)) / ENVIRONMENT_FILE).read_text("utf-8"))
    except (OSError, ValueError):  # its process was killed while it wrote
        return None
