# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A run's folder is of one run, and a folder that cannot be one is told."""

import os
from pathlib import Path

import pytest

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.run_folder.folder import (
    FolderError,
    RunFolder,
    check_folder,
    describe_folder,
    hold,
)
from torchtitan.grpo.system.folder_lock import FolderInUse


def make_config(folder: Path | str) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.grpo.stop_timeout_seconds = -2.0  # a wait is not what is tested
    return config


@pytest.mark.parametrize(
    "name",
    [
        "/proc/x", "/proc/x/y", "/sys/x", "/dev/null/x", "{tmp}/file", "{tmp}/file/x", "{tmp}/loop/x",
        "{tmp}/dangling", "{tmp}/" + "x" * 300, "{tmp}/new/" + "y" * 256, "{tmp}/nul\0",
        "", " ", "~/x", "~other/x", "s3://bucket/x", "file:///tmp/x", "hf+x://a",
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_is_refused_by_the_check_and_by_the_start(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    config = make_config(name.format(tmp=tmp_path))
    before = sorted(tmp_path.iterdir())
    messages = []
    try:
        check_folder(config)
    except FolderError as error:
        messages.append(str(error))
    else:  # this user may not, and another one may
        messages += [line.removeprefix("warning: ") for line in describe_folder(config)]
    with pytest.raises(FolderError) as refused:
        RunFolder(config)
    messages.append(str(refused.value))
    assert len(messages) == 2
    for message in messages:
        assert message.startswith(
            "job.dump_folder must be a folder that this user can make and write"
        )
        assert config.job.dump_folder in message
        assert "\n" not in message
    assert {p for p in tmp_path.iterdir() if p.name != "new"} == set(before)


@pytest.mark.parametrize("exists", [True, False])
def test_a_check_takes_no_lock_and_leaves_nothing(tmp_path, monkeypatch, exists):
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    config = make_config(folder)
    check_folder(config)
    assert list(describe_folder(config)) == []
    assert list(tmp_path.rglob("*")) == ([folder] if exists else [])
    monkeypatch.setattr(os, "access", lambda *_: False)  # as of a user other than root
    if exists:
        check_folder(config)
        (line,) = describe_folder(config)
        assert line.startswith("warning: job.dump_folder must be") and "Permission denied" in line


def test_what_a_run_writes_elsewhere_is_locked_as_well(tmp_path):
    first, second = make_config(tmp_path / "first"), make_config(tmp_path / "second")
    holder = RunFolder(first)
    RunFolder(second).close(failed=False)
    holder.close(failed=False)
    for config in (first, second):
        config.checkpoint.enable, config.checkpoint.folder = True, str(tmp_path / "checkpoints")
    holder = RunFolder(first)
    with pytest.raises(FolderInUse, match=r"checkpoint\.folder = "):
        RunFolder(second)
    second.checkpoint.folder = "checkpoint"
    RunFolder(second).close(failed=False)
    holder.close(failed=False)
    for config in (first, second):
        config.checkpoint.folder, config.rollout.record = "checkpoint", str(tmp_path / "r.jsonl")
    holder = RunFolder(first)
    with pytest.raises(FolderInUse, match=r"rollout\.record = "):
        RunFolder(second)
    holder.close(failed=False)
    assert not list(tmp_path.rglob("*.lock"))


@pytest.mark.parametrize("other", ["run", "./run", "link", "run/", "run/../run"])
def test_a_folder_is_held_by_whatever_name(tmp_path, monkeypatch, other):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    held = RunFolder(make_config("run"))
    with pytest.raises(FolderInUse):
        RunFolder(make_config(other))
    (line,) = describe_folder(make_config(other))
    assert f"is in use by process {os.getpid()}" in line
    held.close(failed=True)
    RunFolder(make_config(other)).close(failed=False)


def test_an_evaluation_holds_its_own_folder_alone(tmp_path):
    config = make_config(tmp_path / "run")
    run = RunFolder(config)
    evaluation = hold(config, tmp_path / "run/evaluate/step-4")
    with pytest.raises(FolderInUse, match="evaluate/step-4 can be written by one process"):
        hold(config, tmp_path / "run/evaluate/step-4")
    hold(config, tmp_path / "run/evaluate/step-8").close()
    evaluation.close()
    run.close(failed=False)
