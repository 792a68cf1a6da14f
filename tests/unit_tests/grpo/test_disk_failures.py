# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A disk that is full and a folder that cannot be written are one message each."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan.grpo.inference.server_log import remedy
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.known_failures import known_failure


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a file system can be mounted by root alone")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def message(error: BaseException, folder: Path) -> str | None:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    return known_failure(error, config)


def test_a_full_disk_is_named_with_its_file(small_disk: Path):
    file = small_disk / "metrics.jsonl"
    with pytest.raises(OSError) as caught, file.open("wb") as output:
        output.write(bytes(4 << 20))
    found = message(caught.value, small_disk)
    assert found is not None and found.startswith(
        f"The disk of {small_disk} is full: 0 MiB are free."
    )
    assert "job.dump_folder" in found and "\n" not in found


def test_a_disk_with_room_but_without_inodes_is_told_apart(small_disk: Path):
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", str(small_disk)], check=True, timeout=30)
    (small_disk / "last").touch()
    with pytest.raises(OSError) as caught:
        (small_disk / "metrics.jsonl").touch()
    found = message(caught.value, small_disk)
    assert found is not None and "takes no more files: all its inodes are used" in found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_does_not_fit_on_the_disk(small_disk: Path):
    state = {"weight": torch.ones(1 << 20)}
    with pytest.raises(BaseException) as caught:
        dcp.save(state, checkpoint_id=str(small_disk / "step-1"), no_dist=True)
    found = message(caught.value, small_disk)
    assert found is not None and "is full" in found, repr(caught.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError) as caught:
        (file / "run").mkdir(parents=True)
    found = message(caught.value, file / "run")
    assert found is not None
    assert found.startswith(f"{file / 'run'} must be a place where this user may write, but: Not a")


def test_other_errors_stay_what_they_are(tmp_path: Path):
    assert message(FileNotFoundError(2, "No such file", "x"), tmp_path) is None
    assert message(RuntimeError("something else"), tmp_path) is None


def test_a_server_whose_log_found_no_room_is_told_apart(small_disk: Path):
    log = small_disk / "server.log"
    log.touch()
    (small_disk / "other").write_bytes(bytes(900_000))
    assert remedy(log).startswith(f"The disk of {log} is full (0.")
    assert remedy(small_disk.parent / "server.log") == ""
