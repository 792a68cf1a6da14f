# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tells a new start by the user from a restart by torchrun or a scheduler.

torchrun starts ranks again with the same command line if one dies (``--max-restarts``) or a node
joins, and schedulers start whole jobs again. Such a restart must continue the run, even if
``job.overwrite`` is set, which would replace it. A run therefore first notes in its folder, in one
atomic rename, to which launch it belongs (:func:`note_launch`). The attempt's number cannot replace
the note, because each agent counts its own attempts. But an attempt whose number is not the first never
removes a run, because the run may be of its own launch.
"""

import os
from pathlib import Path

import msgspec

from torchtitan.grpo.run_folder.contents import STARTS_FOLDER
from torchtitan.grpo.system.files import write_whole
from torchtitan.grpo.system.network import boot_id

LAUNCH_VARIABLE = "TORCHTITAN_GRPO_LAUNCH"
"""Command of `scripts/launch_multinode.sh`, up to the settings of the run."""

LAUNCH_ID_VARIABLE = "TORCHTITAN_GRPO_LAUNCH_ID"
"""A run's name by a scheduler that starts whole runs again, the same each time."""

_FILE = f"{STARTS_FOLDER}/launch.json"


class Launch(msgspec.Struct):
    """The note in a run's folder about its launch. All fields are empty if the note is damaged.

    A requeue of ``slurm_job`` restarts the run. ``folder`` is the name that the folder had at the launch.
    """

    launch: str | None = None
    slurm_job: str | None = None
    folder: str = ""


def launch_id() -> str | None:
    """Returns an id of this launch, or None without a launcher.

    The id comes from the launcher, or else names the folder where torchrun's agent keeps its ranks' files.
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
    """Returns the launch noted in a folder, or None without a note. Raises OSError if it is unreadable."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=Launch)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, ValueError):
        return Launch()


def is_gone_on_with(folder: Path) -> bool:
    """Whether somebody may have continued the replaced run in this folder since it was moved here."""
    try:
        noted = noted_launch(folder)
    except OSError:
        return True
    return noted is not None and noted.folder == folder.name


def is_restart(dump_folder: str) -> bool:
    """Whether the run in a folder belongs to this rank's launch. Raises OSError if its note is unreadable."""
    if (noted := noted_launch(Path(dump_folder))) is None:
        return False
    if noted.launch is not None and noted.launch == launch_id():
        return True
    job = os.environ.get("SLURM_JOB_ID")
    return bool(job) and _count("SLURM_RESTART_COUNT") > 0 and noted.slurm_job == job


def is_first_attempt(dump_folder: str) -> bool:
    """Whether no launcher counts an earlier attempt, and the note is not damaged."""
    counts = _count("TORCHELASTIC_RESTART_COUNT") + _count("SLURM_RESTART_COUNT")
    return not counts and noted_launch(Path(dump_folder)) != Launch()


def note_launch(dump_folder: str) -> None:
    """Notes that the run in a folder belongs to this launch, before the run writes anything else."""
    folder = Path(dump_folder).resolve().name
    noted = Launch(launch_id(), os.environ.get("SLURM_JOB_ID"), folder)
    write_whole(Path(dump_folder, _FILE), msgspec.json.encode(noted) + b"\n")


def _count(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0
