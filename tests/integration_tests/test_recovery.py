# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ranks that are killed, disks that are full, checkpoints that are damaged, and other layouts.

The runs are started as a user starts them, with the agent that starts ranks again.
"""

import functools
import hashlib
import os
import pickle
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = "import torchtitan_grpo; torchtitan_grpo.main()"
SMALL = ("--grpo.prompts_per_step=2", "--evaluation.interval=0", "--evaluation.num_prompts=2")
CHECKPOINT = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0")
REPEATABLE = ("--rollout.deterministic", "--rollout.max_head_offpolicyness=0")


@pytest.fixture
def train(make_run, repository):
    """Starts ``torchtitan-grpo train`` on the quickstart."""

    def start(*arguments: str, name: str = "run", ranks: int = 2):
        run = make_run(name=name)
        run.folder.mkdir(exist_ok=True, parents=True)
        launcher = run.fork_server.launcher()
        command = [
            *(sys.executable, "-c", PROGRAM, "train", "train_configs/quickstart.toml"),
            *("--nproc", str(ranks)),
            "--workers.pass_variables=TORCH_GRPO_TEST_MARK",
            *(*SMALL, *CHECKPOINT, *arguments),
        ]
        if not any(argument.startswith("--job.dump_folder") for argument in arguments):
            command.append(f"--job.dump_folder={run.folder}")
        if "--inference.no-launch" not in arguments:
            command.append(f"--inference.python={launcher}")
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        variables |= {"TORCH_GRPO_TEST_MARK": run.mark}
        with (run.folder / "console.log").open("ab") as console:
            run.process = subprocess.Popen(
                command, cwd=repository, start_new_session=True, env=os.environ | variables,
                stdout=console, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return run

    return start


def rank_of(run, rank: int) -> psutil.Process:
    found = [
        p for p in run.processes("torchtitan.grpo_train") if p.environ().get("RANK") == str(rank)
    ]
    assert len(found) == 1, found
    return found[0]


def weights_of(run, step: int) -> str:
    (file,) = (run.folder / f"hf/step-{step}").glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def steps_of(run) -> list[int]:
    return [record["step"] for record in run.metrics]


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_kills", [1, pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(5400)])]
)
def test_a_run_that_is_killed_and_resumed_has_the_weights_of_one_that_was_not(train, num_kills):
    """Each kill hits a rank at a random moment of a random step; torchrun starts the ranks again."""
    last = 2 * num_kills + 4
    steps = f"--training.steps={last}"
    whole = train(steps, *REPEATABLE, name="whole")
    killed = train(
        steps, *REPEATABLE, f"--max-restarts={num_kills}", "--checkpoint.async_mode=async",
        "--job.overwrite", name="killed",
    )  # fmt: skip
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    first = rng.randrange(2)
    victims = [(first + kill) % 2 for kill in range(num_kills)]
    for number, victim in enumerate(victims):
        # After at least one checkpoint since the last kill, so that each kill costs some steps.
        step = min(2 * (number + 1) + rng.randrange(2), last - 2)
        # The ranks have found each other by then, and lines of steps to be taken again are gone.
        killed.wait_for(lambda: (killed.folder / f"starts/{number + 1}").is_dir())  # noqa: B023
        killed.wait_for_step(step)
        time.sleep(rng.random() / 2)
        process = rank_of(killed, victim)
        pid = process.pid
        process.kill()
        killed.wait_for(lambda: killed.console.count("The ranks were started again") > number)  # noqa: B023
        message = re.findall(r"^error: (.*)$", killed.console, re.MULTILINE)[-1]
        assert re.match(
            rf"Training rank {victim} on \S+ \(process {pid}\) died in step \d+, phase: .+; the last "
            r"completed step is \d+\. What the collectives of the other ranks were doing is in ",
            message,
        ), message
        assert f"from the newest checkpoint (restart {number + 1} of {num_kills}" in message
    assert killed.finish() == 0, killed.console[-6000:]
    assert whole.finish() == 0, whole.console[-6000:]
    assert len(killed.errors()) == num_kills, "one message for each kill"
    assert not killed.has_traceback(), killed.console[-6000:]
    assert steps_of(killed) == steps_of(whole) == list(range(1, last + 1))
    trained = [[r["trained"] for r in run.records("ledger.jsonl")] for run in (whole, killed)]
    assert trained[0] == trained[1]
    assert weights_of(killed, last) == weights_of(whole, last)
    traces = list((killed.folder / "comm_traces").glob("rank_*"))
    assert traces and pickle.loads(traces[0].read_bytes())["entries"]


KILLED_IN_A_START = """
import os, signal, sys

def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("starts/2/environment.json"):
        os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "0":
    sys.addaudithook(hook)
"""


def test_a_rank_that_dies_while_a_restart_is_recorded_costs_no_step(
    train, make_run, repository, tmp_path, monkeypatch
):
    """The command says job.overwrite, which has counted; and one folder is of one run."""
    rows = (repository / "assets/reverse_digits/train.jsonl").read_text().splitlines()[:64]
    examples = tmp_path / "examples.jsonl"
    examples.write_text("\n".join(row.replace('"answer"', '"completion"') for row in rows) + "\n")
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(KILLED_IN_A_START)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"))
    run = train(
        f"--sft.path={examples}", "--training.steps=2000", "--job.overwrite", "--max-restarts=2",
        "--checkpoint.keep_latest_k=2", "--inference.no-launch",
    )  # fmt: skip
    run.wait_for_step(4)
    second = make_run(
        f"--sft.path={examples}", "--training.steps=2", *CHECKPOINT,
        f"--job.dump_folder={run.folder}", "--grpo.stop_timeout_seconds=0.1", name="second",
    )  # fmt: skip
    assert (
        f"job.dump_folder = {run.folder} can be written by one process at a time" in second.fail()
    )
    before = run.metrics[:4]
    rank_of(run, 0).kill()
    run.wait_for(lambda: run.console.count("The ranks were started again") == 2)
    assert run.console.count("Resumes after step") >= 2, run.console[-6000:]
    assert run.metrics[:4] == before
    run.process.terminate()
    assert run.finish() == 128 + 15
    assert [r["step"] for r in run.metrics] == list(range(1, len(run.metrics) + 1))


def test_the_last_rank_that_dies_is_reported_by_the_agent(train):
    run = train("--training.steps=1000", ranks=1)
    run.wait_for_step(1)
    rank_of(run, 0).kill()
    assert run.finish(120) == 128 + 9
    (message,) = run.errors()
    assert re.search(
        r"Training rank 0 on \S+ \(process \d+\) was ended by SIGKILL in step \d+, phase: .+; the last "
        r"completed step is \d+\.",
        message,
    ), message
    run.wait_until_processes_end()


@pytest.mark.long
def test_servers_of_the_user_outlive_restarts_and_a_guard_ends_them(train, serve):
    """The server that was there before a rank died serves the ranks that follow. Then it dies too."""
    server = serve()
    run = train(
        "--training.steps=1000", "--max-restarts=3", "--inference.no-launch",
        f"--inference.urls={server.url}", "--guards.servers_lost=stop", "--guards.servers_lost_seconds=3",
        "--weight_sync.timeout_seconds=5", "--rollout.request_timeout_seconds=10",
    )  # fmt: skip
    run.wait_for_step(3)
    rank_of(run, 1).kill()
    run.wait_for(lambda: "The ranks were started again" in run.console)
    done = len(run.metrics)
    run.wait_for_step(done + 2)
    assert server.process.poll() is None, server.log_tail()
    newest = max(map(int, re.findall(r"tensors as version (\d+)", server.log_file.read_text())))
    assert newest >= done, "the same server takes the weights of the ranks that follow"

    server.process.kill()
    assert run.finish(120) == 3, run.console[-6000:]
    assert "With guards.servers_lost = 'stop' the run ends here" in run.errors()[-1]
    assert run.console.count("The ranks were started again") == 1
    assert f"Stopped after step {run.metrics[-1]['step']}. " in run.console
    assert not run.has_traceback(), run.console[-6000:]
    run.wait_until_processes_end()


@pytest.fixture
def small_disk(tmp_path: Path, request):
    """A disk that has room for one checkpoint, which :func:`grow` makes large."""
    folder, size = tmp_path / "disk", getattr(request, "param", "9m")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("NOT TESTED: a full disk, because file systems may not be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.long
def test_a_disk_that_is_full_at_the_start_is_one_message(train, small_disk):
    """There is room for the first files, and none for the record of the start."""
    (small_disk / "other").write_bytes(bytes((9 << 20) - (16 << 10)))
    run = train(f"--job.dump_folder={small_disk}/run")
    assert run.finish() == 1, run.console[-6000:]
    (message,) = run.errors()
    assert f"The disk of {small_disk}/run" in message and "is full: 0 MiB are free" in message
    assert not run.has_traceback(), run.console[-6000:]
    run.wait_until_processes_end()


@pytest.mark.long
@pytest.mark.parametrize("small_disk", ["12m"], indirect=True)
def test_a_run_on_a_small_disk_promises_nothing_and_leaves_nothing_half(train, small_disk):
    """The disk has room for the first of four checkpoints, and for the export."""
    folder = small_disk / "run"
    run = train(f"--job.dump_folder={folder}", "--training.steps=8")
    assert run.finish() == 4, run.console[-6000:]
    (message,) = run.errors()
    assert f"{folder}/checkpoint/step-8 could not be written: the disk of" in message
    assert "The newest whole checkpoint is that of step 2." in message
    assert run.console.count("saves again") == 2, "after step 4 and 6, and not after the last one"
    assert not run.has_traceback(), run.console[-6000:]
    whole = checkpoints(folder / "checkpoint")
    assert [file.stem for file in (folder / "rollouts").iterdir()] == whole == ["step-2"]
    assert not list(folder.rglob("*.partial"))
    run.wait_until_processes_end()


@pytest.mark.long
def test_a_full_disk_costs_checkpoints_only_and_a_damaged_one_is_passed_over(train, small_disk):
    """Then other numbers of ranks and servers, and another layout, go on from what there is."""
    folder = small_disk / "checkpoint"
    on_disk = f"--checkpoint.folder={folder}"
    train = functools.partial(train, "--rollout.max_head_offpolicyness=0")
    run = train(on_disk, "--training.steps=4", "--max-restarts=1")
    assert run.finish() == 4, "the last checkpoint is missing, which no restart makes up for"
    assert "started again" not in run.console and "saves again" not in run.console
    assert not list((run.folder / "rollouts").glob("step-4*")), "nothing is kept beside it"
    assert run.summary["steps"] == 4 and (run.folder / "hf/step-4").is_dir()
    assert checkpoints(folder) == ["step-2"], "what was written in part is removed"
    full = f"The checkpoint {folder}/step-4 could not be written: the disk of {folder} is full: "
    assert run.console.count(full) == 2, "told when it failed, and as the reason of the status"
    assert "The newest whole checkpoint is that of step 2." in run.console

    run = train(on_disk, "--training.steps=6", "--checkpoint.save_failure=stop")
    assert run.finish() == 1
    message = run.errors()[-1]
    assert message.startswith(f"The checkpoint {folder}/step-4 could not be written: the disk of")
    assert not run.has_traceback(), run.console[-6000:]
    assert checkpoints(folder) == ["step-2"]

    grow(small_disk)
    (run.folder / "console.log").unlink()
    run = train(on_disk, "--training.steps=6", "--inference.num_servers=3", ranks=3)
    assert run.finish() == 0, run.console[-6000:]
    assert f"Resumes after step 2 from {folder}/step-2" in run.console
    assert "number of ranks: 2 -> 3, takes effect" in run.console

    data = folder / "step-6/__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    run = train(on_disk, "--training.steps=8", "--parallelism.tensor_parallel_degree=2")
    assert run.finish() == 0, run.console[-6000:]
    damaged = (
        "The checkpoint of step 6 is damaged and is not used (__1_0.distcp: not what was written)"
    )
    assert damaged in run.console, run.console[-6000:]
    assert f"Resumes after step 4 from {folder}/step-4" in run.console
    assert steps_of(run) == list(range(1, 9))
    # Synchronous training: whatever ranks and servers there were, they had the same weights.
    assert all(abs(record["mismatch/kl"]) < 1e-6 for record in run.metrics), run.metrics
