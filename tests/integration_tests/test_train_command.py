# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo train``, started as a user starts it."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from hub_cache import REVISION, fill_cache

SMALL = ("--grpo.prompts_per_step=2", "--evaluation.num_prompts=4")
PATIENCE_SECONDS = 400


@pytest.fixture
def train(make_run, tmp_path, repository):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "assets").symlink_to(repository / "assets")

    def start(*arguments: str, name: str = "run", **environment: str):
        run = make_run(name=f"elsewhere/{name}")
        run.train(*SMALL, *arguments, f"--job.dump_folder={name}", cwd=folder, **environment)
        return run

    return start


def test_a_run_from_any_folder_with_a_model_of_the_hub(train, tmp_path, repository):
    snapshot = fill_cache(
        tmp_path / "home", "some-lab/tiny", repository / "assets/reverse_digits/model"
    )
    run = train(
        *("--nproc", "2", "--training.steps=1", "--model.hf_assets_path=some-lab/tiny"),
        HF_HOME=str(tmp_path / "home"),
    )
    assert run.finish(PATIENCE_SECONDS) == 0, run.console[-6000:]
    assert "Starting 2 training ranks on the CPU." in run.console
    assert run.console.count(f"revision {REVISION} of the Hub, in {snapshot}") == 1
    export = Path(run.folder.parent, run.summary["hf_checkpoint"])
    assert {"config.json", "tokenizer.json"} <= {file.name for file in export.iterdir()}
    assert not any(file.is_symlink() for file in export.iterdir())
    log = next((run.folder / "servers").glob("*.log")).read_text()
    assert "Traceback" not in log
    run.wait_until_processes_end()


def test_files_of_the_current_folder_shadow_no_module(train, make_run, tmp_path, repository):
    """In the launcher, the rank, the rollout process, the reward worker, and the server."""
    folder = tmp_path / "elsewhere"
    for name in (
        "random",
        "math",
        "logging",
        "tokenizers",
        "json",
        "types",
        "torch",
        "string",
        "numpy",
    ):
        (folder / f"{name}.py").write_text("raise SystemExit(f'{__name__} is shadowed')\n")
    (folder / "neighbour.py").write_text("import random\nONE = float(random.random() >= 0)\n")
    (folder / "own.py").write_text(
        "import neighbour\ndef right(completions): return [neighbour.ONE] * len(completions)\n"
    )
    run = make_run(name="elsewhere/run")
    run.start_command(
        *(sys.executable, "-P", "-c", "import torchtitan_grpo; torchtitan_grpo.main()", "train"),
        *(str(repository / "train_configs/quickstart.toml"), *SMALL, "--training.steps=1"),
        *("--reward.functions=own:right,own.py:right", "--reward.weights=1.0,0.5"),
        "--job.dump_folder=run",
        cwd=folder,
    )
    assert run.finish(PATIENCE_SECONDS) == 0, run.console[-6000:]
    assert run.metrics[0]["reward/mean"] == 1.5


@pytest.mark.long
def test_a_mistake_is_one_message_with_the_ranks_own_status(train):
    run = train("--nproc=2", "--grpo.group_size=0")
    assert run.finish(PATIENCE_SECONDS) == 2
    lines = [line for line in run.console.splitlines() if line.strip()]
    assert lines[0] == "Starting 2 training ranks on the CPU."
    assert lines[1].startswith("error: grpo.group_size must be at least 1, got 0.")
    assert len(lines) == 2, run.console


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_ends_the_run_in_order_with_its_status(train, signum):
    run = train("--training.steps=1000")
    run.wait_for_step(1)
    run.process.send_signal(signum)
    run.process.send_signal(signum)  # a second one changes nothing
    assert run.finish(PATIENCE_SECONDS) == 128 + signum, run.console[-6000:]
    run.wait_until_processes_end()
    assert "Traceback" not in run.console
    assert run.errors() == []
    assert "death signal" not in run.console  # torchrun's report


def _imports_torch(process: psutil.Process) -> bool:
    return any("libtorch" in file.path for file in process.memory_maps())


@pytest.mark.parametrize("is_torch_of", ["the launcher", "the ranks"])
def test_ctrl_c_during_the_imports_is_told_in_one_line(train, is_torch_of):
    run = train("--training.steps=1000", "--nproc=2")

    def holds() -> bool:
        found = run.processes("torchtitan.grpo_train")
        if is_torch_of == "the launcher":
            found = [psutil.Process(run.process.pid)]
        return bool(found) and all(map(_imports_torch, found))

    run.wait_for(holds)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.finish(PATIENCE_SECONDS) == 128 + signal.SIGINT
    lines = [line for line in run.console.splitlines() if not line.startswith("Starting 2")]
    assert lines == ["Stopped before the first step. The checkpoints of earlier starts are kept."]
    run.wait_until_processes_end()


# Runs a command on a terminal of its own, which SIGUSR1 closes.
ON_TERMINAL = """
import contextlib, os, pty, signal, sys
pid, terminal = pty.fork()
if pid == 0:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGUSR1, lambda *_: os.close(terminal))
with contextlib.suppress(OSError):
    while data := os.read(terminal, 65536):
        os.write(1, data)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_run_whose_terminal_is_closed_saves_a_checkpoint(make_run):
    run = make_run()
    arguments = (
        *SMALL,
        "--training.steps=1000",
        "--checkpoint.enable",
        "--checkpoint.interval=500",
    )
    run.train(
        *arguments, f"--job.dump_folder={run.folder}", before=(sys.executable, "-c", ON_TERMINAL)
    )
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGUSR1)
    assert run.finish(PATIENCE_SECONDS) == 128 + signal.SIGTERM, run.console[-6000:]
    run.wait_until_processes_end()
    last = run.metrics[-1]["step"]
    assert (run.folder / "checkpoint" / f"step-{last}" / ".metadata").exists()


@pytest.mark.long
def test_under_nohup_a_hangup_changes_nothing(make_run):
    run = make_run()
    run.train(*SMALL, f"--job.dump_folder={run.folder}", "--training.steps=1000", before=("nohup",))
    run.wait_for_step(1)
    os.killpg(run.process.pid, signal.SIGHUP)
    run.wait_for_step(len(run.metrics) + 3)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish(PATIENCE_SECONDS) == 128 + signal.SIGTERM, run.console[-6000:]
    run.wait_until_processes_end()


def test_help_is_printed_once_by_all_ranks_together(make_run):
    run = make_run("--help", num_ranks=2)
    run.start()
    assert run.finish(PATIENCE_SECONDS) == 0, run.console[-3000:]
    assert run.console.count("usage: torchtitan-grpo train") == 1
    assert run.console.index("--grpo.group_size") < run.console.index("--training.")
