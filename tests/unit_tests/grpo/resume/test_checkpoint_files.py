# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A save that is killed leaves a checkpoint that is whole or absent, and damage is found."""

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan.grpo.resume.checkpoint_files import (
    CheckpointWriter,
    clear_folder,
    is_whole,
    quick_problem,
    remove_incomplete,
)
from torchtitan.grpo.system.files import damaged_files

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Each kills the process at one moment of a save.
PHASES = {
    "before anything is written": "prepare_local_plan, before",
    "before the data": "write_data, before",
    "in the data": "in a file, __0_0.distcp",
    "after the data": "write_data, after",
    "in the metadata": "in a file, .metadata.tmp",
    "before the metadata has its name": "rename, before",
}
PROGRAM = """
import os, signal, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.grpo.resume import checkpoint_files as files

warnings.simplefilter("ignore")
folder, what, when = sys.argv[1:]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

if what == "in a file":
    write = files._SummingStream.write
    def write_half(stream, data):
        if stream._stream.name.endswith(when):
            write(stream, bytes(data)[: len(bytes(data)) // 2])
            stream._stream.flush()
            die()
        return write(stream, data)
    files._SummingStream.write = write_half
elif what != "nothing":
    owner = files._SummingFileSystem if what == "rename" else files.CheckpointWriter
    call = getattr(owner, what)
    def call_and_die(*arguments):
        if when == "before":
            die()
        call(*arguments)
        die()
    setattr(owner, what, call_and_die)
state = {"weights": torch.ones(1000), "train_state": {"step": 4}}
dcp.save(state, storage_writer=files.CheckpointWriter(folder), no_dist=True)
"""


def save(folder: Path, step: int) -> Path:
    path = folder / f"step-{step}"
    state = {"weights": torch.full((1000,), float(step)), "train_state": {"step": step}}
    dcp.save(state, storage_writer=CheckpointWriter(path), no_dist=True)
    return path


def problems(folder: Path) -> list[str]:
    quick = quick_problem(folder)
    return [quick] if quick else list(damaged_files(folder))


def run_program(fork_server, folder: Path, status: int, *when: str) -> None:
    script, log = folder / "save.py", folder / "log"
    script.write_text(PROGRAM)
    with log.open("w") as output:
        process = fork_server.start(script, [str(folder / "step-4"), *when], output=output)
    assert process.wait(120) == status, log.read_text()


def test_the_program_saves_if_it_is_not_killed(fork_server, tmp_path):
    run_program(fork_server, tmp_path, 0, "nothing", "")
    assert is_whole(tmp_path / "step-4") and problems(tmp_path / "step-4") == []


@pytest.mark.parametrize(
    ("phase", "existed"),
    [*((phase, True) for phase in PHASES), ("in the data", False), ("in the metadata", False)],
)
def test_a_save_that_is_killed_leaves_nothing_that_counts(fork_server, tmp_path, phase, existed):
    earlier = save(tmp_path, 2)
    if existed:  # as when steps are taken again after a start from an earlier checkpoint
        save(tmp_path, 4)
    what, when = PHASES[phase].split(", ")
    run_program(fork_server, tmp_path, -signal.SIGKILL, what, when)
    # The one that is replaced is whole until its replacement begins.
    assert is_whole(tmp_path / "step-4") == (existed and phase == "before anything is written")
    assert problems(tmp_path / "step-4") == []
    assert problems(earlier) == []
    remove_incomplete(tmp_path)
    assert earlier.is_dir()
    assert (tmp_path / "step-4").is_dir() == is_whole(tmp_path / "step-4")


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("__0_0.distcp", flip_a_bit, "__0_0.distcp"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        ("__0_0.distcp", lambda file: file.write_bytes(b"short"), "__0_0.distcp has 5 bytes instead of"),
        ("__0_0.distcp", lambda file: file.write_bytes(file.read_bytes() + b"x"), "__0_0.distcp has "),
        (".metadata", flip_a_bit, ".metadata"),
        (".metadata", lambda file: file.write_bytes(b"x"), "its .metadata cannot be read"),
    ],
)  # fmt: skip
def test_each_kind_of_damage_is_found_and_named(tmp_path, name, damage, problem):
    folder = save(tmp_path, 2)
    damage(folder / name)
    assert problems(folder)[0].startswith((problem, "its .metadata cannot be read"))


def test_files_of_an_earlier_save_of_the_step_are_removed(tmp_path):
    folder = save(tmp_path, 2)
    for name in ("__5_0.distcp", "sums_5.json"):  # of a rank that this run does not have
        (folder / name).write_text('{"__5_0.distcp": [1, 1]}')
    assert problems(save(tmp_path, 2)) == []
    assert not (folder / "sums_5.json").exists()


def test_ranks_divide_the_files_that_are_read_and_one_without_checksums_is_taken(tmp_path):
    folder = save(tmp_path, 2)
    for name in ("__0_0.distcp", ".metadata"):
        flip_a_bit(folder / name)
    shares = [list(damaged_files(folder, share, 2)) for share in range(2)]
    assert sorted(shares) == [[".metadata"], ["__0_0.distcp"]]
    flip_a_bit(folder / ".metadata")
    for file in folder.glob("sums_*"):
        file.unlink()
    assert problems(folder) == []


def test_an_empty_folder_of_checkpoints_is_removed_with_what_was_interrupted(tmp_path):
    (tmp_path / "checkpoint/step-2").mkdir(parents=True)
    assert remove_incomplete(tmp_path / "checkpoint") == [tmp_path / "checkpoint/step-2"]
    assert not (tmp_path / "checkpoint").exists()


def test_a_folder_is_no_whole_checkpoint_from_the_first_moment_of_its_removal(
    tmp_path, monkeypatch
):
    path, removed, unlink = save(tmp_path, 4), [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda f, **kw: (removed.append(f.name), unlink(f, **kw)))
    clear_folder(path)
    assert removed[0] == ".metadata" and "__0_0.distcp" in removed
