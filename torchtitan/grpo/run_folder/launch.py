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

from torchtitan.grpo.run_folder.contents import STARTS_FOLDER
from torchtitan.grpo.system.files import write_whole
from torchtitan.grpo.system.network import boot_id

LAUNCH_VARIABLE = "TORCHTITAN_GRPO_LAUNCH"
"""Variable in which `scripts/launch_multinode.sh` leaves its command, up to the settings of the run."""

LAUNCH_ID_VARIABLE = "TORCHTITAN_GRPO_LAUNCH_ID"
"""Variable in which a scheduler that starts whole runs again names the run, the same each time."""

_FILE = f"{STARTS_FOLDER}/launch.json"


class Launch(msgspec.Struct):
    """What the folder of a run keeps about the launch that the run is of.

    Attributes:
        launch: See :func:`launch_id`.
        slurm_job: The job of Slurm that it is in, which starts it again when it is requeued.
        folder: Name of the folder at that time. A run that is moved aside gets another one.

    All is empty if the file is damaged.
    """

    launch: str | None = None
    slurm_job: str | None = None
    folder: str = ""


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


def noted_launch(folder: Path) -> Launch | None:
    """Returns the launch that the run in a folder is of; None without a note.

    Raises:
        OSError: If the note is there and cannot be read.
    """
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=Launch)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, ValueError):
        return Launch()


def is_gone_on_with(folder: Path) -> bool:
    """Whether a start has named this folder since a run was moved here, or may have."""
    try:
        noted = noted_launch(folder)
    except OSError:
        return True
    return noted is not None and noted.folder == folder.name


def is_restart(dump_folder: str) -> bool:
    """Whether the run in a folder is of the launch that this rank is of.

    Raises:
        OSError: If that cannot be read.
    """
    if (noted := noted_launch(Path(dump_folder))) is None:
        return False
    if noted.launch is not None and noted.launch == launch_id():
        return True
    job = os.environ.get("SLURM_JOB_ID")
    return bool(job) and _count("SLURM_RESTART_COUNT") > 0 and noted.slurm_job == job


def is_first_attempt(dump_folder: str) -> bool:
    """Whether the launcher has not started this run before, as far as it and the note say."""
    counts = _count("TORCHELASTIC_RESTART_COUNT") + _count("SLURM_RESTART_COUNT")
    return not counts and noted_launch(Path(dump_folder)) != Launch()


def note_launch(dump_folder: str) -> None:
    """Notes that the run in a folder is of this launch from now on. Nothing of it is there yet."""
    folder = Path(dump_folder).resolve().name
    noted = Launch(launch_id(), os.environ.get("SLURM_JOB_ID"), folder)
    write_whole(Path(dump_folder, _FILE), msgspec.json.encode(noted) + b"\n")


def _count(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0
