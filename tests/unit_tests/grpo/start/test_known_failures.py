# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Failures that torch and the system report at length are one message with the settings that help."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.inference.server_log import remedy
from torchtitan.grpo.start import entry
from torchtitan.grpo.start.known_failures import known_failure

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 10.25 MiB is free. Including non-PyTorch memory, this process has 79.13 GiB memory in "
    "use. See documentation for Memory Management (https://pytorch.org/docs/stable/notes/cuda.html)"
)


@pytest.fixture
def config() -> JobConfig:
    config = JobConfig()
    config.training.local_batch_size, config.training.seq_len = 4, 2048
    return config


def test_memory_that_the_host_cannot_give_names_what_needs_less(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    found = known_failure(caught.value, config)
    assert found is not None
    assert found.startswith(
        "Rank 0 ran out of host memory when 3.36e+07 GiB were asked for. It trains on "
        "training.local_batch_size = 4 rows of training.seq_len = 2048 tokens at a time."
    )
    for setting in (
        "local_batch_size below 4", "activation_checkpoint.mode = 'full'", "seq_len",
        "parallelism.fsdp_between_microbatches = 'free' (it is 'auto')",
    ):  # fmt: skip
        assert setting in found
    assert "ref_model_offload" not in found  # it has no effect on CPU
    assert "\n" not in found


def test_memory_that_a_gpu_cannot_give_names_what_is_not_set_yet(config):
    error = torch.OutOfMemoryError(CUDA_MESSAGE)
    found = known_failure(error, config)
    assert found is not None
    assert "out of GPU memory when 20.00 GiB were asked for and 10.25 MiB were free" in found
    assert "gpu-memory-utilization" in found
    assert "grpo.ref_model_offload" not in found  # there is no reference model
    config.grpo.kl_coef = 0.1
    assert "grpo.ref_model_offload = true" in str(known_failure(error, config))
    config.training.local_batch_size = 1
    config.activation_checkpoint.mode = "full"
    config.grpo.logprob_keep_logits, config.grpo.ref_model_offload = False, True
    found = str(known_failure(error, config))
    for setting in ("local_batch_size below", "checkpoint.mode", "keep_logits", "ref_model"):
        assert setting not in found


def test_a_pipeline_is_told_about_its_own_settings(config):
    settings, grpo = config.parallelism, config.grpo
    settings.pipeline_parallel_degree = 2
    settings.pipeline_parallel_schedule = "ZBVZeroBubble"
    settings.pipeline_parallel_microbatch_size = 2
    grpo.recompute_early_blocks = -1
    helpful = (
        "parallelism.pipeline_parallel_microbatch_size below 2",
        "grpo.recompute_early_blocks = 1",
        "a smaller grpo.max_pending_weight_grads_gib",
        'parallelism.pipeline_parallel_schedule = "VHalf"',
    )
    found = str(known_failure(MemoryError(), config))
    assert "trains on parallelism.pipeline_parallel_microbatch_size = 2 rows" in found
    assert all(setting in found for setting in helpful)
    settings.pipeline_parallel_schedule = "VHalf"
    settings.pipeline_parallel_microbatch_size = grpo.recompute_early_blocks = 1
    grpo.max_pending_weight_grads_gib = 0
    found = str(known_failure(MemoryError(), config))
    assert not any(setting in found for setting in helpful)


def test_memory_is_found_missing_however_it_is_said(config):
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    for error in (MemoryError(), RuntimeError("CUDA error: out of memory"), RuntimeError(cublas)):
        outer = ValueError("a step")
        outer.__cause__ = error
        assert "ran out of" in str(known_failure(outer, config))


def test_other_failures_are_left_as_they_are(config):
    for error in (
        KeyError("memory"),
        RuntimeError("shape mismatch"),
        FileNotFoundError(2, "", "x"),
    ):
        assert known_failure(error, config) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("held", [{"w": torch.zeros(3)}, {"other": torch.zeros(4)}])
def test_another_models_checkpoint_is_named_with_its_folder(config, tmp_path, held):
    dcp.save(held, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path, no_dist=True)
    config.checkpoint.initial_load_path = str(tmp_path)
    config.model.hf_assets_path = "models/mine"
    assert not isinstance(caught.value, Exception), "torch's class: entry.py must catch it by name"
    found = known_failure(caught.value, config)
    assert found is not None
    assert f"The checkpoint in {tmp_path} (checkpoint.initial_load_path) does not fit" in found
    assert "(models/mine)" in found
    assert "\n" not in found


def test_torchrun_gets_the_message_to_repeat(tmp_path: Path, monkeypatch, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    wait = lambda seconds: True  # noqa: E731
    assert entry._report(False, ValueError("not by this rank"), 2, wait) == 2
    assert not file.exists()
    assert entry._report(True, ValueError("what is wrong"), 2, wait) == 2
    assert json.loads(file.read_text())["message"]["message"] == "what is wrong"
    for place in (str(tmp_path / "gone/error.json"), ""):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", place)
        assert entry._report(True, ValueError("x"), 2, wait) == 2


# -- disks ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
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


def test_a_full_disk_is_named_with_its_file(small_disk: Path, config):
    config.job.dump_folder = str(small_disk)
    file = small_disk / "metrics.jsonl"
    with pytest.raises(OSError) as caught, file.open("wb") as output:
        output.write(bytes(4 << 20))
    found = str(known_failure(caught.value, config))
    assert found.startswith(f"The disk of {small_disk} is full: 0 MiB are free.")
    assert "job.dump_folder" in found and "\n" not in found
    # One with room but without inodes is told apart.
    file.unlink()
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", str(small_disk)], check=True, timeout=30)
    (small_disk / "last").touch()
    with pytest.raises(OSError) as caught:
        (small_disk / "metrics.jsonl").touch()
    assert "takes no more files: all its inodes are used" in str(
        known_failure(caught.value, config)
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, config):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError) as caught:
        (file / "run").mkdir(parents=True)
    config.job.dump_folder = str(file / "run")
    message = f"{file / 'run'} must be a place where this user may write, but: Not a"
    assert str(known_failure(caught.value, config)).startswith(message)


def test_a_server_whose_log_found_no_room_is_told_apart(small_disk: Path):
    log = small_disk / "server.log"
    log.touch()
    (small_disk / "other").write_bytes(bytes(900_000))
    assert remedy(log).startswith(f"The disk of {log} is full (0.")
    assert remedy(small_disk.parent / "server.log") == ""
