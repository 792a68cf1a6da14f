# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What runs write into ``job.dump_folder``: found before a new run would write over it."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from torchtitan.grpo.job_config import JobConfig

STARTS_FOLDER = "starts"
"""Folder in the dump folder with one numbered folder for each start of the run."""

WANDB_ID_FILE = "wandb_id_rank"
"""Beginning of the name of the file with the id of a rank's run in wandb."""

_WRITTEN = (
    *("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "ledger.jsonl"),
    *("metrics.jsonl.partial", "evaluations.jsonl.partial"),
    *("samples.jsonl.partial", "ledger.jsonl.partial"),
    *("evaluation_samples.jsonl", "evaluation_samples.jsonl.partial"),
    *("summary.json*", "reward_curve.png", "rollout_process.log*"),
    *("hf/step-*", "peft/step-*", "rollouts/step-*.msgpack*", f"{STARTS_FOLDER}/[0-9]*"),
    *("servers/*.log*", "monitoring/*.json*", "evaluate/*"),
)
"""Patterns of the files and folders that every run may write. Those of optional features, whose
folders have settings, are added by :func:`_patterns`."""


def describe_run(config: JobConfig) -> str | None:
    """Returns what an earlier run has left in the dump folder, or None if nothing would be lost.

    Logs and empty files, which a run leaves that failed before its first step, do not count.
    """
    folder = Path(config.job.dump_folder)
    found = []
    if num_steps := _num_lines(folder / "metrics.jsonl"):
        found.append(f"metrics of {num_steps} {'step' if num_steps == 1 else 'steps'}")
    for kind, subfolder in (("checkpoints", config.checkpoint.folder), ("exports", "hf")):
        if steps := steps_in(folder / subfolder):
            found.append(f"{kind} ({subfolder}) of step {', '.join(map(str, steps))}")
    if not found and _num_lines(folder / "samples.jsonl"):
        found.append("samples.jsonl")
    return " and ".join(found) or None


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of which a folder holds a folder ``step-N``, ascending."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def remove_run(config: JobConfig) -> None:
    """Removes what runs have written into the dump folder, and nothing else.

    A folder that is empty afterwards is removed as well, except for the dump folder itself.
    """
    folder = Path(config.job.dump_folder)
    for path in list(_written(config)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == folder or any(parent.iterdir()):
                break
            parent.rmdir()


def next_free_folder(dump_folder: str) -> Path:
    """Returns the first of ``outputs/run-2``, ``outputs/run-3``, ... that does not exist."""
    folder = Path(dump_folder)
    match = re.fullmatch(r"(.*)-(\d+)", folder.name)
    name, number = (match[1], int(match[2])) if match else (folder.name, 1)
    while (candidate := folder.with_name(f"{name}-{number + 1}")).exists():
        number += 1
    return candidate


def _written(config: JobConfig) -> Iterator[Path]:
    folder = Path(config.job.dump_folder)
    for pattern in _patterns(config):
        yield from folder.glob(pattern)
    record = Path(config.rollout.record or "")
    if record.is_file() and record.resolve().is_relative_to(folder.resolve()):
        yield record


def _patterns(config: JobConfig) -> Iterator[str]:
    yield from _WRITTEN
    yield f"{config.checkpoint.folder}/step-*"
    yield f"{config.metrics.save_tb_folder}/**/events.out.tfevents*"
    yield f"{WANDB_ID_FILE}[0-9]*"
    yield f"{config.metrics.save_tb_folder}/[0-9]*/**/wandb"
    yield f"{config.comm.save_traces_folder}/{config.comm.save_traces_file_prefix}[0-9]*"
    yield f"{config.profiling.save_traces_folder}/iteration_*"
    yield f"{config.profiling.save_memory_snapshot_folder}/iteration_*"


def _num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0
