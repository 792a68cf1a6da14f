# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The record of a run's settings that each checkpoint holds, written and read."""

import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.errors import RunError
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.system.files import open_regular

STATE_KEY = "run_record"
"""Name of the record among the states of a checkpoint."""

_SAMPLE_BYTES = 65536


class CheckpointError(RunError, ValueError):
    """A run cannot start as asked from a checkpoint or in its folder; the message says why."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint cannot be read, or its files are not what was written.

    Args:
        folder: The checkpoint.
        reason: What is wrong with it, in one line.
    """

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            f"A run must resume from a checkpoint that can be read, and {folder} cannot ({reason}). "
            "Its files are damaged, or were written by an incompatible release. Name an earlier "
            "step of that folder with --checkpoint.load_step, or remove the damaged checkpoint."
        )
        self.reason = reason


class RunRecord(msgspec.Struct):
    """What later starts must know about the run that wrote a checkpoint.

    Attributes:
        settings: The configuration, by table and key, with keys masked.
        num_ranks: Number of training ranks.
        architecture: Architecture of the model.
        model_sizes: Torchtitan's arguments of the model, by name.
        weights: Digest of samples of the weights in ``model.hf_assets_path``, with which the run
            began; empty if the directory has none.
        prompt_bytes: Size of each file of prompts.
        schedule_steps: Number of steps over which the learning rate's schedule is laid.
        date: Local time of the run's first start, in ISO format, which chat templates print.
    """

    settings: dict[str, dict[str, Any]]
    num_ranks: int
    architecture: str
    model_sizes: dict[str, str]
    weights: str
    prompt_bytes: dict[str, int]
    schedule_steps: int
    date: str = ""


def record_of(config: JobConfig, model: HFModel, schedule_steps: int) -> RunRecord:
    """Returns the record of a run. It must be made before a trainer is: that changes the model."""
    paths = config.prompts.paths or [config.prompts.path]
    return RunRecord(
        settings=config.to_dict(),
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        architecture=model.architecture,
        model_sizes=dict(_sizes(asdict(model.model_args))),  # pyright: ignore[reportArgumentType]
        weights=weights_digest(model.path),
        prompt_bytes={path: Path(path).stat().st_size for path in paths if Path(path).is_file()},
        schedule_steps=schedule_steps,
        date=datetime.now().isoformat(timespec="seconds"),
    )


def _sizes(arguments: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in arguments.items():
        if isinstance(value, dict):
            yield from _sizes(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def weights_digest(folder: Path) -> str:
    """Returns a digest of the sizes of a directory's safetensors files and of parts of each.

    Training changes every weight, so samples tell two models of equal sizes apart, and a large
    model need not be read.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with open_regular(file) as stream:
            for position in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(position)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


class RecordState(Stateful):
    """Puts a record into checkpoints. It is never loaded with them; see :func:`read_kept`."""

    def __init__(self, record: RunRecord) -> None:
        self._text = msgspec.json.encode(record, enc_hook=str).decode()

    def state_dict(self) -> dict[str, Any]:
        return {"json": self._text}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: this run has its own record."""


def states_in(folder: Path) -> set[str]:
    """Returns the names of the states that a checkpoint holds, such as ``optimizer``.

    A directory that is no checkpoint of torch, such as a Hugging Face directory, has none.

    Raises:
        CheckpointDamaged: If the checkpoint is damaged.
    """
    if not (folder / ".metadata").is_file():
        return set()
    with _refusing_damage(folder):
        metadata = FileSystemReader(folder).read_metadata()
    return {key.partition(".")[0] for key in metadata.state_dict_metadata}


def read_kept(folder: Path, states: set[str]) -> tuple[int, RunRecord | None]:
    """Returns the step of a whole checkpoint and its record, without a process group.

    The record is None if the checkpoint was written before checkpoints had records.

    Raises:
        CheckpointDamaged: If the checkpoint is damaged.
    """
    wanted: dict[str, Any] = {"train_state": {"step": 0}}
    if STATE_KEY in states:
        wanted[STATE_KEY] = {"json": ""}
    with _refusing_damage(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads in a single process
        dcp.load(wanted, checkpoint_id=str(folder), no_dist=True)
        record = None
        if STATE_KEY in states:
            record = msgspec.json.decode(wanted[STATE_KEY]["json"], type=RunRecord)
        return int(wanted["train_state"]["step"]), record


@contextmanager
def _refusing_damage(folder: Path) -> Iterator[None]:
    """Turns whatever reading a damaged file raises into one error that names the checkpoint."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointDamaged(folder, reason) from error
