# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tells a start by the user from a start by what started the run before.

torchrun starts the ranks again with the same command line if one of them dies (``--max-restarts``)
or if a node joins, and schedulers start whole jobs again. Such a restart must go on with the run:
``job.overwrite`` would remove it. Two things tell, and both come from the launcher.

- Its name. Before a run writes anything else into its folder, it notes there which launch it is of
  (:func:`note_launch`), in one rename. A start of the same launch is a restart.
- The number of the attempt. By itself it proves nothing, because an agent that joins later counts its
  own, and because an earlier attempt may have ended before it wrote anything. But what an attempt
  after the first finds in the folder may be its own run, so it never removes it.
"""

import os
from pathlib import Path

import msgspec

from torchtitan.grpo.command_line.launched import LAUNCH_ID_VARIABLE
from torchtitan.grpo.run_folder.contents import STARTS_FOLDER
from torchtitan.grpo.system.process_identity import boot_id
from torchtitan.grpo.system.whole_file import write_whole

_FILE = f"{STARTS_FOLDER}/launch.json"


class Launch(msgspec.Struct):
    """What the folder of a run keeps about the launch that the run is of.

    Attributes:
        launch: See :func:`launch_id`.
        slurm_job: The job of Slurm that it is in, which starts it again when it is requeued.
    """

    launch: str | None = None
    slurm_job: str | None = None


def launch_id() -> str | None:
    """Returns the name of the launch that this rank is of, or None without a launcher.

    All starts by one torchrun have its rendezvous id. A static rendezvous has none where the user
    gave none; its agents stay the same ones, and each has a folder of its own for its ranks.
    """
    environ = os.environ
    if given := environ.get(LAUNCH_ID_VARIABLE):
        return given
    run_id, file = environ.get("TORCHELASTIC_RUN_ID"), environ.get("TORCHELASTIC_ERROR_FILE")
    if run_id and run_id != "none":
        return run_id
    if run_id and file:
        # The agent's folder holds one for each attempt, and that one for each rank.
        return f"{boot_id()} {Path(file).parents[2]}"
    return None


def is_restart(dump_folder: str) -> bool:
    """Whether the run in a folder is of the launch that this rank is of."""
    try:
        noted = msgspec.json.decode(Path(dump_folder, _FILE).read_bytes(), type=Launch)
    except (OSError, msgspec.DecodeError):
        return False
    if noted.launch is not None and noted.launch == launch_id():
        return True
    job = os.environ.get("SLURM_JOB_ID")
    return bool(job) and _count("SLURM_RESTART_COUNT") > 0 and noted.slurm_job == job


def is_first_attempt() -> bool:
    """Whether the launcher has not started this run before, as far as it says."""
    return not _count("TORCHELASTIC_RESTART_COUNT") and not _count("SLURM_RESTART_COUNT")


def note_launch(dump_folder: str) -> None:
    """Notes that the run in a folder is of this launch from now on. Nothing of it is there yet."""
    noted = Launch(launch_id(), os.environ.get("SLURM_JOB_ID"))
    write_whole(Path(dump_folder, _FILE), msgspec.json.encode(noted) + b"\n")


def _count(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0
