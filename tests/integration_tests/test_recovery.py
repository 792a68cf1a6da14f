# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ranks that are killed, disks that are full, checkpoints that are damaged, and other layouts.

The runs are started as a user starts them, with the agent that starts ranks again.
"""

import functools
import hashlib
import pickle
import random
import re
import subprocess
import time
from pathlib import Path

import pytest

SMALL = ("--grpo.prompts_per_step=2", "--evaluation.interval=0", "--evaluation.num_prompts=2")
CHECKPOINT = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0")
REPEATABLE = ("--rollout.deterministic", "--rollout.max_head_offpolicyness=0")


@pytest.fixture
def train(make_run):
    def start(*arguments: str, name: str = "run", ranks: int = 2):
        run = make_run(name=name)
        more = [] if "--inference.no-launch" in arguments else [run.fork_server.launcher()]
        run.train(
            "--nproc", str(ranks), *SMALL, *CHECKPOINT, f"--job.dump_folder={run.folder}",
            *(f"--inference.python={python}" for python in more), *arguments,
        )  # fmt: skip
        return run

    return start


def test_an_export_that_finds_no_room_costs_itself_alone(train):
    run = train(
        "--nproc=2", "--training.steps=3", "--grpo.hf_export_interval=1", "--max-restarts=1"
    )
    run.folder.mkdir(exist_ok=True)
    (run.folder / "hf").symlink_to("/dev/full")  # no folder
    assert run.finish() == 4, run.console[-6000:]
    assert steps_of(run) == [1, 2, 3]
    for step in (1, 2, 3):
        assert f"The export {run.folder}/hf/step-{step} could not be written: " in run.console
    assert run.console.count("exports again after grpo.hf_export_interval = 1 steps") == 2
    assert "started again" not in run.console and not run.has_traceback()
    assert checkpoints(run.folder / "checkpoint")[-1] == "step-3"
    (run.folder / "hf").unlink()
    run = train("--training.steps=3")
    assert run.finish() == 0, run.console[-6000:]
    assert (run.folder / "hf/step-3").is_dir(), "a new start makes up for the last one"


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
    last = 2 * num_kills + 6
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
        process = killed.rank(victim)  # looking for it takes time
        pid = process.pid
        killed.wait_for_step(step)
        time.sleep(rng.random() / 2)
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


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("NOT TESTED: a full disk, because file systems may not be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


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
