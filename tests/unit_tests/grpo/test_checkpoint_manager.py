# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What is said about checkpoints that fail or take long, and which are kept."""

import errno
import logging
import queue
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import AsyncMode

from torchtitan.grpo.checkpoint_manager import GRPOCheckpointManager, SaveFailed
from torchtitan.grpo.job_config import Checkpoint


def failure(number: int) -> CheckpointException:
    return CheckpointException("write", {0: (OSError(number, "what the kernel says"), None)})  # pyright: ignore[reportArgumentType]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch) -> GRPOCheckpointManager:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    made = GRPOCheckpointManager.__new__(GRPOCheckpointManager)
    made.enable, made.enable_staging, made.folder = True, False, str(tmp_path / "checkpoint")
    made.settings, made.interval, made.async_mode = Checkpoint(), 20, AsyncMode.ASYNC
    made.mp, made.stager, made.save_future = None, None, None
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
    assert (
        f"{manager.folder}/step-80 could not be written: the disk of {manager.folder} is full"
        in told
    )
    assert "The newest whole checkpoint is that of step 60. Training goes on" in told
    assert not Path(manager._saving).exists(), "what was written in part is removed"
    assert manager.save_future is None


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.EROFS, "OSError"), (errno.EACCES, "Permission")]
)
def test_a_disk_that_is_read_only_is_named_and_ends_the_run_if_it_is_to(manager, number, reason):
    manager.settings.save_failure = "stop"
    manager.save_future = failed(failure(number))
    with pytest.raises(
        SaveFailed, match=rf"step-80 could not be written: {reason}.*kernel says.* \"stop\""
    ):
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
