# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What is said about checkpoints that fail or take long, and which are kept."""

import errno
import logging
import queue
import re
import resource
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.grpo.config.frame import Checkpoint
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models import hf_weights
from torchtitan.grpo.resume import checkpoint
from torchtitan.grpo.resume.checkpoint_files import CheckpointWriter
from torchtitan.grpo.resume.checkpoint_manager import (
    GRPOCheckpointManager,
    LastSaveFailed,
    SaveFailed,
)
from torchtitan.grpo.rollout.saved import file_of
from torchtitan.grpo.upstream.checkpoint import AsyncMode


def failure(number: int) -> CheckpointException:
    return CheckpointException("write", {0: (OSError(number, "what the kernel says"), None)})  # pyright: ignore[reportArgumentType]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch) -> GRPOCheckpointManager:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    made = GRPOCheckpointManager.__new__(GRPOCheckpointManager)
    made.enable, made.enable_staging, made.folder = True, False, str(tmp_path / "checkpoint")
    made.dump_folder = str(tmp_path)
    made.settings, made.interval, made.async_mode = Checkpoint(), 20, AsyncMode.ASYNC
    made.mp, made.stager = None, None
    made.staging_future, made.save_future = None, None
    made.keep_latest_k, made.purge_queue = 2, queue.Queue()
    made.purge_thread = threading.Thread()  # never started
    for step in (20, 40, 60):
        checkpoint = Path(made.folder, f"step-{step}")
        checkpoint.mkdir(parents=True)
        (checkpoint / ".metadata").touch()
    made._saving = str(Path(made.folder, "step-80"))
    Path(made._saving).mkdir()
    return made


def failed(error: BaseException) -> Future:
    future: Future = Future()
    future.set_exception(error)
    return future


def test_a_failure_in_the_background_is_told_at_the_next_step_and_once(manager, caplog):
    manager.save_future = failed(failure(errno.ENOSPC))
    for _ in range(3):
        manager.maybe_wait_for_staging()
    manager._async_wait()
    (told,) = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert f"/step-80 could not be written: the disk of {manager.folder} is full" in told
    assert "The newest whole checkpoint is that of step 60. Training goes on" in told
    assert not Path(manager._saving).exists(), "what was written in part is removed"
    assert manager.save_future is None


# What torch, safetensors and the kernel say where a file finds no room, and what the user reads.
NO_ROOM = {
    "torch's check": (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
                      "the disk of .* took a part of a file only, .*ulimit -f"),
    "a library": (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
                  "the disk of .* is full: "),
    "a library, a quota": (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), "the quota on the disk of"),
    "a limit of files": (OSError(errno.EFBIG, "File too large"), "a file in .* larger than the system allows"),
    "another rank": (OSError(errno.EDQUOT, "Disk quota exceeded"), "the quota on the disk of"),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_ROOM)
def test_a_checkpoint_that_found_no_room_is_told_as_such(manager, caplog, what):
    error, expected = NO_ROOM[what]
    failures = {0: (error, None)}
    if what == "another rank":
        failures = {1: (error, None), 0: (RuntimeError("another rank failed"), None)}
    for is_last in (False, True):
        caplog.clear()
        manager._is_told = False  # as with each new checkpoint
        kept = file_of(manager.dump_folder, 80)
        kept.parent.mkdir(exist_ok=True)
        kept.touch()
        manager.save_future = failed(CheckpointException("write", failures))
        manager.finish() if is_last else manager._async_wait()
        (told,) = [r.message for r in caplog.records if r.levelno == logging.ERROR]
        assert re.search(f"step-80 could not be written: {expected}", told), told
        assert ("saves again" in told) != is_last
        assert ("It was to be the last one: the run ends without it." in told) == is_last
        assert not kept.exists(), "rollouts are not kept beside a checkpoint that does not exist"
    with pytest.raises(LastSaveFailed, match=expected) as ended:
        manager.raise_if_missing()
    assert "The newest whole checkpoint is that of step 60." in str(ended.value)


# What an export meets, and what is said.
EXPORTS = {
    "a broken disk": (OSError(errno.EIO, "Input/output error"), "OSError: .*Input/output error"),
    "open files": (OSError(errno.EMFILE, "Too many open files"), r"too many files are open \(ulimit -n\)"),
    "open files, of the system": (OSError(errno.ENFILE, "x"), "too many files are open"),
    "a library, open files": (SafetensorError("I/O error: Too many open files (os error 24)"), "ulimit -n"),
    "a library, a full disk": (
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        "the disk of .* is full: ",
    ),
    "a library, a broken disk": (SafetensorError("I/O error: (os error 5)"), "os error 5"),
    "a quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), "the quota on the disk of"),
    "permissions": (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
}  # fmt: skip


@pytest.mark.parametrize("what", EXPORTS)
def test_an_export_that_fails_is_told_and_tried_again_and_only_the_last_ends_the_run(
    tmp_path, monkeypatch, caplog, what
):
    error, expected = EXPORTS[what]
    config = JobConfig()
    config.job.dump_folder = str(tmp_path)
    trainer: Any = SimpleNamespace(job_config=config, model_parts=[], step=20)
    model: Any = SimpleNamespace(path=tmp_path)
    adapter: Any = None
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint, "export_policy", Mock(side_effect=error))
    checkpoint.export(trainer, adapter, model, is_last=False)
    (told,) = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert re.search(f"hf/step-20 could not be written: .*{expected}", told), told
    assert "exports again after grpo.hf_export_interval" in told
    with pytest.raises(LastSaveFailed, match=expected):
        checkpoint.export(trainer, adapter, model, is_last=True)


def test_a_writer_that_fails_still_takes_part_up_to_the_last_tensor(tmp_path, monkeypatch):
    rest = iter([(f"t{i}", torch.ones(8)) for i in range(5)])
    monkeypatch.setattr(hf_weights, "full_hf_tensors", lambda *_: rest)
    adapter: Any = None
    with pytest.raises(FileNotFoundError):
        hf_weights.export_hf(
            [], adapter, tmp_path, tmp_path / "gone/hf/step-1", torch.float32, is_writer=True
        )
    assert next(rest, None) is None


def test_a_later_checkpoint_makes_up_for_one_that_failed(manager, tmp_path, monkeypatch):
    manager.save_future = failed(failure(errno.ENOSPC))
    manager._async_wait()
    assert manager.missing is not None
    monkeypatch.setattr(dcp, "save", lambda state, storage_writer: None)
    manager.dcp_save({}, str(tmp_path / "checkpoint/step-100"), AsyncMode.DISABLED)
    manager.raise_if_missing()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_real_checkpoint_that_finds_no_room(manager, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointException) as failure:
            writer = CheckpointWriter(manager._saving)
            dcp.save({"weight": torch.ones(1 << 20)}, storage_writer=writer, no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    manager.save_future = failed(failure.value)
    manager.finish()
    (told,) = [r.message for r in caplog.records if "could not be written" in r.message]
    assert "ulimit -f" in told
    assert not Path(manager._saving).exists()


@pytest.mark.parametrize(
    ("number", "why"), [(errno.EROFS, "OSError"), (errno.EACCES, "Permission")]
)
def test_a_disk_that_is_read_only_is_named_and_ends_the_run_if_it_is_to(manager, number, why):
    manager.settings.save_failure = "stop"
    manager.save_future = failed(failure(number))
    message = rf"step-80 could not be written: {why}.*kernel says.* \"stop\""
    with pytest.raises(SaveFailed, match=message):
        manager._async_wait()
    assert Path(manager.folder, "step-60").is_dir()


def test_a_slow_disk_is_told_once(manager, caplog):
    manager._tell_if_slow(20, seconds=4.0, since_last=1.0)
    manager._tell_if_slow(40, seconds=9.0, since_last=100.0)
    assert not caplog.records
    for step in (60, 80):
        manager._tell_if_slow(step, seconds=30.0, since_last=100.0)
    (told,) = [record.message for record in caplog.records]
    assert "The checkpoint of step 60 held up training for 30.0 s, after 100.0 s" in told
    assert "raise checkpoint.interval." in told  # it is asynchronous already


def test_only_whole_checkpoints_count_among_those_that_are_kept(manager):
    manager._purge_stale_checkpoints()
    assert manager.purge_queue.get_nowait() == f"{manager.folder}/step-20"
    assert manager.purge_queue.empty()
    assert not Path(manager.folder, "step-20/.metadata").exists(), "from now on it is not whole"
