# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One flipped bit in each kind of file that a run leaves: nothing changes, or the file is named."""

import logging
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed.checkpoint as dcp

from torchtitan.grpo.commands.verify import check_run
from torchtitan.grpo.data.record import RecordReader
from torchtitan.grpo.data.replay import check_batch
from torchtitan.grpo.models.hf_config import ModelError, read_hf_model
from torchtitan.grpo.observe.run_log import RunLog, read_records
from torchtitan.grpo.resume.checkpoint import progress_from
from torchtitan.grpo.resume.checkpoint_files import quick_problem
from torchtitan.grpo.rollout.codec import pack
from torchtitan.grpo.rollout.saved import SavedRolloutsError, check_saved, read_saved
from torchtitan.grpo.run_folder.launch import is_restart
from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.system.files import damaged_files
from torchtitan.grpo.types import PromptProgress
from torchtitan.grpo.weight_wire.model_folder import require_undamaged

TEMPERATURE = 0.8  # of the quickstart's configuration
SIZES = {"vocab_size": 128, "row_len": 64}
LOGS = ("metrics", "evaluations", "samples", "ledger", "evaluation_samples")
FOR_PEOPLE = (
    "starts/*/environment.json",
    "starts/*/config.toml",
    "*.log",
    "comm_traces/*",
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


class Told(Exception):
    """A file is refused or left out, with a message that names it."""


def read_checkpoint(file: Path) -> None:
    problem = quick_problem(file.parent) or next(damaged_files(file.parent), None)
    if problem:
        raise Told(problem if file.name in problem else f"{file.name} of a damaged checkpoint")


def progress_of(checkpoint: Path) -> PromptProgress:
    state: dict[str, Any] = {"train_state": {"prompt_progress": ""}}
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    return progress_from(state["train_state"])


def read_rollouts(file: Path) -> Any:
    step = int(file.stem.removeprefix("step-"))
    progress = progress_of(file.parents[1] / "checkpoint" / file.stem)
    try:
        saved = read_saved(file, step)
        check_saved(saved, progress, **SIZES)
    except SavedRolloutsError as error:
        raise Told(f"{file.name}: {error}") from error
    return saved.progress


def read_record(file: Path) -> Any:
    reader = RecordReader(str(file), SIZES["vocab_size"], TEMPERATURE, "rollout.replay")
    try:
        batches = list(reader)
        for where, batch in batches:
            check_batch(batch, where, **SIZES)
    except DataError as error:
        raise Told(str(error)) from error
    if reader.was_cut_off:
        raise Told(f"{file.name} is cut off")
    return [msgspec.msgpack.encode(pack(batch)) for _, batch in batches]


def read_export(file: Path) -> Any:
    try:
        require_undamaged(file.parent, "model.hf_assets_path", weights=True)
        return read_hf_model(file.parent).model_args
    except ModelError as error:
        raise Told(str(error)) from error


def read_log(file: Path) -> int:
    """A resumed run continues the log; records are not trained on, and their numbers may change."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        copy = Path(shutil.copy(file, file.with_name(f"copy-{file.name}")))
        RunLog(copy, 100).close()
        # A log that holds no record is removed.
        lines = copy.read_bytes().splitlines(keepends=True) if copy.exists() else []
        kept = len(list(read_records(copy, lines, are_metrics=file.stem == "metrics")))
    finally:
        root.removeHandler(handler)
    if told:
        raise Told(told[0].replace("copy-", ""))
    return kept


def read_summary(file: Path) -> None:
    try:
        checks = check_run(file.parent, want_in_flight=False)
    except ValueError as error:
        raise Told(str(error)) from error
    if not all(check.holds for check in checks):
        raise Told(f"{file.name}: a check of the verification fails")


KINDS: dict[str, Callable[[Path], Any] | None] = {
    "checkpoint/step-*/*": read_checkpoint,
    "rollouts/step-*.msgpack": read_rollouts,
    "rollouts.jsonl": read_record,
    "hf/step-*/*": read_export,
    **dict.fromkeys((f"{name}.jsonl" for name in LOGS), read_log),
    "summary.json": read_summary,
    "starts/launch.json": lambda file: is_restart(str(file.parents[1])),
    **dict.fromkeys(FOR_PEOPLE),
}
"""How the project reads each kind of file; None for those that it does not read."""


def files_of(folder: Path, pattern: str) -> list[Path]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [f for f in files if fnmatch(str(f.relative_to(folder)), pattern)]


def flipped(content: bytes) -> Iterator[bytes]:
    """The content with one other bit, at several places."""
    last = len(content) - 1
    for position in {0, last // 5, last // 3, last // 2, last * 3 // 4, last}:
        other = bytearray(content)
        other[position] ^= 1 << position % 8
        yield bytes(other)


def test_a_flipped_bit_changes_nothing_or_is_told_with_the_file(make_run):
    """A run of two steps leaves all that a run can leave; its files are then read as the project does."""
    run = make_run(
        "--training.steps=2", "--grpo.prompts_per_step=2", "--evaluation.num_prompts=2",
        "--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0",
    )  # fmt: skip
    run.arguments.append(f"--rollout.record={run.folder}/rollouts.jsonl")
    run.succeed()
    names = {str(path.relative_to(run.folder)) for path in files_of(run.folder, "*")}
    assert not {name for name in names if not any(fnmatch(name, kind) for kind in KINDS)}
    for kind, read in KINDS.items():
        files = files_of(run.folder, kind)
        assert files or read is None, f"the run has left nothing of the kind {kind}"
        if read is None:
            continue
        for file in files:
            content, expected = file.read_bytes(), read(file)
            for other in flipped(content):
                file.write_bytes(other)
                try:
                    assert read(file) == expected, file
                except Told as told:
                    assert file.name in str(told), (told, file)
            file.write_bytes(content)
            assert read(file) == expected
