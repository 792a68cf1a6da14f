# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How a rank's process ends, whatever still runs in it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from forked import ForkServer

from torchtitan.grpo.start.entry import _report

LEAVE = "from torchtitan.grpo.start.entry import leave\nimport logging, sys, threading\n"
PATIENCE = 120.0


@pytest.fixture
def leave(fork_server: ForkServer, tmp_path: Path) -> Callable[[str], CompletedProcess[str]]:
    """Runs a program that defines ``main``, in a process that leaves through it."""

    def run(program: str) -> CompletedProcess[str]:
        script = tmp_path / "program.py"
        script.write_text(f"{LEAVE}{program}\nleave(main)\nprint('still here')")
        out, err = tmp_path / "out", tmp_path / "err"
        with out.open("w") as output, err.open("w") as errors:
            process = fork_server.start(script, output=output, errors=errors)
        status = process.wait(PATIENCE)
        return CompletedProcess([], status, out.read_text(), err.read_text())

    return run


def test_a_process_ends_at_once_though_a_thread_waits_and_writes_what_is_held_back(leave):
    # Python waits for such a thread at its end.
    process = leave("""
from logging.handlers import MemoryHandler
held = MemoryHandler(100, target=logging.StreamHandler(sys.stdout))
logging.getLogger().addHandler(held)
def main():
    threading.Thread(target=threading.Event().wait).start()
    sys.stdout.write("said ")
    logging.getLogger().warning("held back")
    return 3
""")
    assert (process.returncode, sorted(process.stdout.split())) == (3, ["back", "held", "said"])
    process = leave("""
def main():
    raise KeyError("a mistake")
""")
    assert process.returncode == 1
    assert "KeyError: 'a mistake'" in process.stderr
    assert "still here" not in process.stdout


def test_a_trainer_is_built_when_the_time_for_communicators_is_set(leave):
    # Torch reads it once, at the first collective over NCCL, which is one of training.
    process = leave("""
import os
from torchtitan.grpo.start import entry
from torchtitan.grpo.config.job_config import JobConfig

class Trainer:
    def __init__(self, *_):
        print(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"])

    def train(self):
        pass

    def close(self):
        pass

def main():
    config = JobConfig()
    config.weight_sync.timeout_seconds = 41.5
    return entry._train(Trainer, config, None, is_rank_zero=False)
""")
    assert process.stdout == "42\n", process.stderr  # it ends without the groups of a real one


def test_an_error_is_reported_by_rank_zero_or_by_a_rank_that_fails_alone(capsys):
    def report(is_rank_zero: bool, is_ended: bool) -> tuple[int, str, list[float]]:
        waits: list[float] = []
        wait = lambda seconds: waits.append(seconds) or is_ended  # noqa: E731
        status = _report(is_rank_zero, ValueError("what is wrong"), 2, wait)
        return status, capsys.readouterr().err, waits

    message = "error: what is wrong\n"
    assert report(is_rank_zero=True, is_ended=False) == (2, message, [])
    assert report(is_rank_zero=False, is_ended=True) == (2, "", [15.0])
    assert report(is_rank_zero=False, is_ended=False) == (2, message, [15.0])


RUNS = """
import contextlib, io, json, pathlib, signal, sys, tempfile
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.grpo.start import entry
from torchtitan.grpo.data.feed import RankZeroFailed
entry._RANK_ZERO_PATIENCE_SECONDS = entry._AGENT_PATIENCE_SECONDS = 0.01
folder = tempfile.mkdtemp()
config = [
    "--job.config_file=train_configs/quickstart.toml", "--grpo.stop_timeout_seconds=600",
    f"--job.dump_folder={folder}/run",
]
found = {}

def run(name, outcome, *args):
    calls = []
    class Trainer:
        def train(self):
            calls.append("train")
            return outcome() if outcome else None
        def close(self):
            calls.append("close")
    def make(config, model, stop, watch):
        calls.append(model.architecture)
        return Trainer()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = entry.run(make, [*config, *args])
        except KeyError:
            status = "raised"
    lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    found[name] = [status, calls, lines]

def fail(error):
    raise error

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
run("whole", None)
run("outside", lambda: fail(TimeoutError("the server is late")))
run("rank zero", lambda: fail(RankZeroFailed("x")))
run("memory", lambda: torch.empty(2**55, dtype=torch.uint8))
run("checkpoint", lambda: fail(CheckpointException("load", {0: (ValueError("Size mismatch"), None)})))
run("mistake", lambda: fail(KeyError("x")))
run("stopped", lambda: signal.raise_signal(signal.SIGTERM))
run("refused", None, "--grpo.group_size=0")
run("dry", None, "--dry-run")
pathlib.Path(folder, "run/hf/step-4").mkdir(parents=True)
run("used", None)
run("used and dry", None, "--dry-run")
run("overwritten", lambda: fail(TimeoutError("late")), "--job.overwrite")
left = pathlib.Path(folder, "run").rglob("step-4")
found["left"] = [path.relative_to(folder).parts[1].partition("-")[0] for path in left]
json.dump(found, sys.stdout)
sys.stdout.flush()
import os
os._exit(0)
"""


def test_each_way_to_end_has_its_status_and_closes_the_trainer(repository, fork_server, tmp_path):
    script, out, err = tmp_path / "program.py", tmp_path / "out", tmp_path / "err"
    script.write_text(RUNS)
    with out.open("w") as output, err.open("w") as errors:
        process = fork_server.start(
            script, output=output, errors=errors, folder=repository,
            environment=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        )  # fmt: skip
    assert process.wait(PATIENCE) == 0, err.read_text()
    ran = ["Qwen3ForCausalLM", "train", "close"]
    found = json.loads(out.read_text().splitlines()[-1])
    refused = found.pop("refused")
    assert refused[:2] == [2, []]
    assert refused[2][0].startswith("error: grpo.group_size must be at least 1, got 0.")
    used = found.pop("used")
    assert used[:2] == [2, []]
    assert used[2][0].startswith("error: job.dump_folder must not hold an earlier run, got")
    (memory,), (checkpoint,) = (found[name].pop() for name in ("memory", "checkpoint"))
    assert memory.startswith(
        "error: Rank 0 ran out of host memory when 3.36e+07 GiB were asked for"
    )
    assert checkpoint.startswith("error: The checkpoint in ")
    assert "does not fit the model of model.hf_assets_path" in checkpoint
    assert found == {
        "overwritten": [1, ran, ["error: late"]],
        "left": ["replaced"],  # it failed before its first step
        "memory": [1, ran],
        "checkpoint": [1, ran],
        "whole": [0, ran, []],
        "outside": [1, ran, ["error: the server is late"]],
        "rank zero": [1, ran, []],
        "mistake": ["raised", ran, []],
        "stopped": [128 + signal.SIGTERM, ran, []],
        "dry": [0, [], []],
        "used and dry": [2, [], []],  # it says so among its findings
    }
