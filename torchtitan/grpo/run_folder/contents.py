# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds what an earlier run left in ``job.dump_folder``, before a new run would overwrite it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `torchtitan-grpo --help` must not import torch
    from torchtitan.grpo.config.job_config import JobConfig

STARTS_FOLDER = "starts"

WANDB_ID_FILE = "wandb_id_rank"

_LOGS = (
    *("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "ledger.jsonl"),
    *("evaluation_samples.jsonl", "events.jsonl"),
)
_WRITTEN = (
    *_LOGS,
    *("summary.json*", "reward_curve.png", "report.html", "rollout_process.log*"),
    *("hf/step-*", "peft/step-*", "rollouts/step-*.msgpack*", f"{STARTS_FOLDER}/[0-9]*"),
    *(f"{STARTS_FOLDER}/launch.json*", f"{WANDB_ID_FILE}[0-9]*"),
    *("servers/*.log*", "monitoring/*.json*", "evaluate/*", "timeline/*.jsonl", "timeline.json.gz"),
)
"""Patterns of what every run may write; :func:`_patterns` adds optional features' folders."""


def describe_run(config: "JobConfig", folder: Path | None = None) -> str | None:
    """Describes what a run has left, or returns None. Logs of a failed start count as nothing."""
    folder = folder or Path(config.job.dump_folder)
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
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def next_free_folder(dump_folder: str) -> Path:
    """Returns, for ``outputs/run``, the first of ``outputs/run-2``, ``outputs/run-3``, ... that is missing."""
    folder = Path(dump_folder)
    match = re.fullmatch(r"(.*)-(\d+)", folder.name)
    name, number = (match[1], int(match[2])) if match else (folder.name, 1)
    while (candidate := folder.with_name(f"{name}-{number + 1}")).exists():
        number += 1
    return candidate


def written(config: "JobConfig") -> Iterator[Path]:
    folder = Path(config.job.dump_folder)
    for base, pattern in _patterns(config):
        yield from (folder / base).glob(pattern)
    record = Path(config.rollout.record or "")
    if record.is_file() and record.resolve().is_relative_to(folder.resolve()):
        yield record


def _patterns(config: "JobConfig") -> Iterator[tuple[str, str]]:
    yield from (("", pattern) for pattern in _WRITTEN)
    yield from (("", f"{name}.partial") for name in _LOGS)
    comm, profiling = config.comm, config.profiling
    yield config.checkpoint.folder, "step-*"
    yield config.metrics.save_tb_folder, "**/events.out.tfevents*"
    yield config.metrics.save_tb_folder, "[0-9]*/**/wandb"
    yield comm.save_traces_folder, f"{comm.save_traces_file_prefix}[0-9]*"
    yield profiling.save_traces_folder, "iteration_*"
    yield profiling.save_memory_snapshot_folder, "iteration_*"


def _num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0
