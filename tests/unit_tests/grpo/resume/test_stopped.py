# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a stopped run says about its checkpoint and about going on."""

from pathlib import Path

import pytest

from torchtitan.grpo.checkpoint import describe_stop, resume_command
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.run_folder.launch import LAUNCH_VARIABLE


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> JobConfig:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = JobConfig()
    config.job.dump_folder = str(tmp_path)
    config.checkpoint.enable = True
    (tmp_path / "checkpoint/step-40").mkdir(parents=True)
    (tmp_path / "checkpoint/step-40/.metadata").touch()
    return config


def test_the_checkpoint_the_rollouts_and_the_command_are_named(config, tmp_path):
    arguments = ["--job.config_file", "my run.toml", "--checkpoint.enable"]
    text = describe_stop(config, 40, 37, arguments)
    assert text == (
        f"Stopped after step 40. The checkpoint is {tmp_path}/checkpoint/step-40; 37 rollouts in "
        "flight are kept with it. To go on:\n    torchtitan-grpo train --nproc 2 "
        "--job.config_file 'my run.toml' --checkpoint.enable"
    )
    assert "could not be kept" in describe_stop(config, 40, None, arguments)


def test_the_command_begins_no_new_run_and_goes_back_to_no_older_step(config, tmp_path):
    arguments = [
        "--job.overwrite",
        "--a=b",
        "--checkpoint.load_step",
        "20",
        "--checkpoint.load_step=3",
    ]
    begin = "--job.no-overwrite --checkpoint.load_step"
    assert resume_command(config, arguments, None).endswith(f"--nproc 2 --a=b {begin}=-1")
    (tmp_path / "checkpoint/step-60").mkdir()  # of steps that were taken again
    (tmp_path / "checkpoint/step-60/.metadata").touch()
    assert describe_stop(config, 40, 0, arguments).endswith(f"--a=b {begin}=40")
    config.job.overwrite, config.checkpoint.load_step = True, 20  # in the file
    command = resume_command(config, ["--a=b"], None)
    assert command.endswith(f"--a=b {begin}=-1")


def test_the_command_of_a_resumed_run_resumes_it_again_whatever_the_file_says(config):
    first = ["--a=b", "--job.no-overwrite", "--checkpoint.load_step=-1"]
    assert resume_command(config, first, None).endswith(" ".join(["train --nproc 2", *first]))


def test_the_value_of_a_flag_goes_with_the_flag(config):
    command = resume_command(config, ["--job.overwrite", "true", "--a", "b"], None)
    assert command.endswith("train --nproc 2 --a b --job.no-overwrite")


def test_keys_are_not_printed(config):
    assert "secret" not in describe_stop(config, 40, 0, ["--inference.api_key", "secret"])


def test_a_run_without_a_checkpoint_says_why(config):
    assert describe_stop(config, 0, 0, []).endswith("because the run had taken no step.")
    config.checkpoint.enable = False
    assert describe_stop(config, 40, 0, []).endswith("because checkpoint.enable is false.")


def test_a_run_on_several_nodes_names_the_command_of_the_nodes(config, monkeypatch):
    launch = "bash scripts/launch_multinode.sh x.toml --nnodes 2 --rdzv-endpoint a:29400"
    monkeypatch.setenv(LAUNCH_VARIABLE, launch)
    arguments = ["--job.config_file", "x.toml", "--job.overwrite", "--training.steps=9"]
    assert resume_command(config, arguments, None) == (
        f"{launch} -- --training.steps=9 --job.no-overwrite\n"
        "on each node, with its own --nproc and --interface, if these are given."
    )
