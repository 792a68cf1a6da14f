"""After Ctrl-C, SIGTERM or the death of a process, the whole run ends soon and keeps checkpoints."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from torchtitan.grpo.rollout.saved import file_of, read_saved
from torchtitan.grpo.system.errors import FOLDER_LOST

SMALL = ("--grpo.prompts_per_step=2", "--evaluation.num_prompts=4", "--training.steps=1000")
CHECKPOINT = (
    *("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"),
    "--checkpoint.async_mode=async",  # a stop must wait for what is being written
)
# A run of its own needs less than 10 s; tests share their machine with others. Left alone it
# would go on for many minutes.
LONGEST_SECONDS = 120.0

SLOW_SCORE = """
import pathlib
import time

def slow(completions):
    if completions != [""]:  # the check before training
        pathlib.Path(__file__).with_name("evaluating").touch()
        time.sleep(5)
    return [1.0] * len(completions)
"""


def _interrupt(run) -> None:
    os.killpg(run.process.pid, signal.SIGINT)


def _terminate(run) -> None:
    run.process.terminate()


def _terminate_all(run) -> None:
    for process in run.left_behind():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


def _expect_end(run) -> None:
    begin = time.monotonic()
    assert run.finish(LONGEST_SECONDS) != 0
    run.wait_until_processes_end(max(1.0, LONGEST_SECONDS - (time.monotonic() - begin)))
    print(f"ended after {time.monotonic() - begin:.1f} s")


def _is_building(run) -> bool:
    return "Building device mesh" in run.console  # upstream says so, where it may


def _starts_servers(run) -> bool:
    return bool(run.processes("grpo.inference.embedded"))


@pytest.mark.parametrize(
    ("is_there", "stop"),
    [
        (_starts_servers, _interrupt),
        pytest.param(_starts_servers, _terminate, marks=pytest.mark.long),
        pytest.param(_is_building, _interrupt, marks=pytest.mark.long),
        pytest.param(_is_building, _terminate, marks=pytest.mark.long),
    ],
)
def test_a_signal_before_the_first_step_ends_the_run(make_run, is_there, stop):
    run = make_run(*SMALL, "--observe.log_level=info", torchrun=True)
    run.start()
    run.wait_for(lambda: is_there(run))
    stop(run)
    _expect_end(run)
    assert not run.has_traceback(), run.console[-6000:]
    assert run.errors() == []


def test_a_stopped_run_resumes_where_it_was(make_run, tmp_path):
    """The first stop is by a signal to all its processes, the second by Ctrl-C while it evaluates."""
    # In short segments, so that what is generated in part is kept as well, and with several groups ahead,
    # so that at any moment some tokens are there, also while a push holds up the server.
    ahead = "--rollout.max_head_offpolicyness=4"
    patient = "--grpo.stop_timeout_seconds=60"
    settings = (*SMALL, *CHECKPOINT, "--rollout.segment_tokens=2", ahead, patient)
    first = make_run(*settings)
    first.start()
    first.wait_for_step(3)
    _terminate_all(first)
    _expect_end(first)
    assert not first.has_traceback(), first.console[-6000:]
    last = first.metrics[-1]["step"]
    assert (first.folder / "checkpoint" / "step-2").is_dir()
    checkpoint = first.folder / "checkpoint" / f"step-{last}"
    assert checkpoint.is_dir(), "the stopped step is kept"
    assert f"Stopped after step {last}. The checkpoint is {checkpoint}; " in first.console
    saved = read_saved(file_of(str(first.folder), last), last)
    assert f"{saved.num_rollouts} rollouts in flight are kept with it. To go on:" in first.console
    assert saved.num_rollouts > 0
    in_flight = {group.group_id for group in (*saved.finished, *saved.unfinished)}

    scorer = tmp_path / "scorer.py"
    scorer.write_text(SLOW_SCORE)
    second = make_run(*settings, f"--evaluation.function={scorer}:slow", torchrun=True)
    second.start()
    second.wait_for(Path(tmp_path, "evaluating").exists)
    _interrupt(second)
    _expect_end(second)
    assert not second.has_traceback(), second.console[-6000:]

    third = make_run(*settings, f"--training.steps={last + 1}").succeed()
    assert [record["step"] for record in third.metrics] == list(range(1, last + 2))
    ledger = third.records("ledger.jsonl")
    trained = [group for record in ledger for group in record["trained"]]
    assert len(trained) == len(set(trained)), "no group is trained twice"
    assert in_flight.isdisjoint(g for r in ledger[:last] for g in r["trained"])
    assert in_flight & set(ledger[last]["trained"]), "the kept rollouts come first"
    reasons = {reason for record in ledger for reason in record["closed"].values()}
    assert reasons.isdisjoint({"failed", "unscored"}), reasons


def test_a_run_whose_folder_is_removed_says_so_and_leaves_nothing_there(make_run):
    run = make_run()
    folder = run.folder / "outputs"
    run.train(*SMALL, *CHECKPOINT, "--max-restarts=2", f"--job.dump_folder={folder}")
    run.wait_for((folder / "checkpoint/step-2/.metadata").exists)
    subprocess.run(["rm", "-r", folder], check=False, capture_output=True)
    while folder.exists():  # the run wrote there at that moment
        subprocess.run(["rm", "-rf", folder], check=False)
    assert run.finish(LONGEST_SECONDS) == FOLDER_LOST, run.console[-6000:]
    run.wait_until_processes_end()
    assert run.console.count(f"job.dump_folder = {folder} was removed or moved while") == 1
    assert len(run.errors()) == 1
    assert not run.has_traceback(), run.console[-6000:]
    assert not folder.exists()


# In the short suite test_recovery.py kills ranks, and test_left_behind.py an agent.
@pytest.mark.parametrize(
    "names", [("rollout", "server"), pytest.param(("rank", "agent"), marks=pytest.mark.long)]
)
def test_the_end_of_any_process_is_the_end_of_the_run(make_run, names):
    once = ("--inference.max_restarts=0", "--rollout.max_process_restarts=0")
    runs = {
        name: make_run(*SMALL, *once, name=name, torchrun="server" not in names) for name in names
    }
    for run in runs.values():
        run.start()
    victims = {
        "rollout": lambda run: run.processes("grpo.rollout.process")[0],
        "server": lambda run: run.processes("grpo.inference.embedded")[0],
        "rank": lambda run: run.rank(0),
        "agent": lambda run: run.process,
    }
    messages = {}
    for name, run in runs.items():
        run.wait_for_step(2)
        victims[name](run).kill()
        if name in ("rollout", "server"):
            messages[name] = run.fail()
        else:
            _expect_end(run)
        assert not run.has_traceback(), run.console[-6000:]
    if "server" in names:
        assert "The rollout process ended with exit code -9" in messages["rollout"]
        assert "The embedded server http://" in messages["server"]
        assert "ended with exit status -9" in messages["server"]
