# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""`scripts/launch_ray.py` on a Ray cluster of this machine alone."""

import os
import re
import signal
from pathlib import Path

import pytest

MODEL = "assets/reverse_digits/model"
NUM_STEPS = 40
SMALL = ("--grpo.prompts_per_step=4", "--evaluation.num_prompts=4")


@pytest.fixture
def launch(make_run, repository: Path, tmp_path: Path):
    python = repository / ".venv-ray/bin/python"
    if not python.is_file():
        pytest.fail(f"{python} is not there: run bash scripts/install_launcher.sh ray first.")

    def start(*arguments: str):
        run = make_run()
        run.start_command(
            *(str(python), str(repository / "scripts/launch_ray.py")),
            *("train_configs/quickstart.toml", "--gpus-per-node", "0", "--cpus-per-node", "0.5"),
            *("--gpus-per-server", "0", "--cpus-per-server", "0.5", "--server-kind", "embedded"),
            *("--registry", str(tmp_path / "registry"), "--place-timeout", "300"),
            *(*arguments, f"--job.dump_folder={run.folder}", *SMALL),
            RAY_USAGE_STATS_ENABLED="0",
            PYTHONUNBUFFERED="1",
        )
        return run

    return start


def _placed(run, name: str) -> list[int]:
    found = re.findall(
        rf"^\[ray\] {name} is placed.* \(process (\d+)\)$", run.console, re.MULTILINE
    )
    return [int(pid) for pid in found]


@pytest.mark.long
def test_actors_that_are_killed_are_placed_again_and_the_run_goes_on(launch):
    run = launch(
        *("--nproc", "2", "--servers", "1", "--server-model", MODEL, "--"),
        *("--checkpoint.enable", "--checkpoint.interval=5", f"--training.steps={NUM_STEPS}"),
    )
    run.wait_for_step(3)
    os.kill(_placed(run, "server-0")[0], signal.SIGKILL)
    run.wait_for(lambda: len(_placed(run, "server-0")) == 2)
    before = len(run.metrics)
    run.wait_for_step(before + 3)
    assert len(_placed(run, "trainer-0")) == 1, "training goes on while a server is placed again"

    os.kill(_placed(run, "trainer-0")[0], signal.SIGKILL)
    assert run.finish() == 0, run.console[-6000:]
    assert len(_placed(run, "trainer-0")) == 2
    assert len(_placed(run, "server-0")) == 2, "servers stay while the trainer is placed again"
    assert [record["step"] for record in run.metrics] == list(range(1, NUM_STEPS + 1))
    run.wait_until_processes_end()


@pytest.mark.long
def test_what_cannot_be_started_is_not_tried_again(launch):
    run = launch("--replacements", "3", "--", "--grpo.group_sizes=4")
    assert run.finish() == 2, run.console[-6000:]
    assert len(_placed(run, "trainer-0")) == 1
    assert "grpo.group_sizes" in run.console
    run.wait_until_processes_end()
