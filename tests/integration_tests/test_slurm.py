# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The scripts for Slurm, under stand-ins for srun and scontrol that start tasks on this machine."""

import json
import os
import signal
from pathlib import Path

import pytest
from server_kinds import held_port

from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.start.node import parse as parse_node

JOB_ID = "4321"
MODEL = "assets/reverse_digits/model"
SMALL = ("--grpo.prompts_per_step=2", "--evaluation.num_prompts=4")
HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "alpha,beta",
    "SLURM_NTASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
    "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "3",
}
ONE_NODE_AND_A_SERVER = HETEROGENEOUS | {
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "127.0.0.1",
    "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "1",
    "SERVER_MODEL": MODEL,
    "SERVER_KIND": "embedded",
    "SERVER_HOST": "127.0.0.1",
}


class Job:
    def __init__(self, run, repository: Path, folder: Path, script: str, **environment: str):
        self.run, self.calls_file = run, folder / "calls.jsonl"
        self.queue_file = folder / "queue"
        self.script = repository / "scripts" / script
        self.run.environment = {
            "PATH": f"{repository / 'tests/programs/slurm'}:{os.environ['PATH']}",
            "TMPDIR": str(folder),
            "SLURM_JOB_ID": JOB_ID,
            "SLURM_SUBMIT_DIR": str(repository),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "127.0.0.1",
            "STANDIN_CALLS": str(self.calls_file),
            "STANDIN_QUEUE": str(self.queue_file),
        } | environment

    def start(self, *arguments: str) -> None:
        self.run.start_command("bash", str(self.script), *arguments, cwd="/")

    def finish(self, *arguments: str) -> int:
        self.start(*arguments)
        return self.run.finish()

    @property
    def calls(self) -> list[dict]:
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    @property
    def queued_again(self) -> list[str]:
        return self.queue_file.read_text().split() if self.queue_file.exists() else []


@pytest.fixture
def make_job(make_run, repository, tmp_path):
    def make(script: str, **environment: str) -> Job:
        return Job(make_run(), repository, tmp_path, script, **environment)

    return make


def _command(call: dict, script: str) -> list[str]:
    command = call["srun"]["command"]
    return command[command.index(script) + 1 :]


def test_a_heterogeneous_job_starts_nodes_and_servers_that_find_each_other(
    make_job, repository, monkeypatch
):
    job = make_job(
        "grpo.slurm", STANDIN_STARTS_NOTHING="1", SERVER_MODEL=MODEL, SERVER_KIND="embedded",
        **HETEROGENEOUS,
    )  # fmt: skip
    assert job.finish("train_configs/quickstart.toml", *SMALL) == 0, job.run.console
    starts = [call for call in job.calls if not call["srun"]["overlap"]]  # not those that signal
    calls = {call["srun"]["het_group"]: call for call in starts}
    assert set(calls) == {0, 1}
    trainers, servers = calls[0]["environments"], calls[1]["environments"]
    assert (len(trainers), len(servers)) == (2, 3)

    words = _command(calls[0], "scripts/launch_multinode.sh")
    for environment in trainers:
        node = parse_node(words, environment)
        assert node.num_nodes == (2, 2)
        assert node.endpoint == ("alpha", 20000 + int(JOB_ID))
        assert node.run_id == f"grpo-{JOB_ID}"
        config = read_config(["--job.config_file", str(repository / node.config_file), *node.rest])
        assert config.grpo.prompts_per_step == 2
        assert (config.inference.kind, config.inference.launch) == ("embedded", False)
        assert config.inference.registry == environment["GRPO_REGISTRY"]

    assert _command(calls[1], "scripts/serve_node.sh") == [MODEL]
    shared = ("GRPO_REGISTRY", "TORCHTITAN_GRPO_API_KEY", "TORCHTITAN_GRPO_ADMIN_KEY")
    for name in shared:
        (value,) = {environment[name] for environment in (*trainers, *servers)}
        assert len(value) >= 20


def test_a_run_that_is_refused_is_not_queued_again(make_job):
    job = make_job("grpo.slurm", NPROC_PER_NODE="2")
    assert job.finish("train_configs/quickstart.toml", "--grpo.group_sizes=4") == 2
    (message,) = job.run.errors()
    assert "grpo.group_sizes" in message
    assert job.queued_again == []


def test_a_job_at_its_time_limit_is_queued_again_and_goes_on(make_job):
    # A free port would be looked for long before the server listens.
    port = {"SERVER_PORT": str(held_port())}
    job = make_job("grpo.slurm", NPROC_PER_NODE="2", **ONE_NODE_AND_A_SERVER, **port)
    run = job.run
    # Several groups ahead in short segments, so that tokens are in flight at any moment.
    ahead = ("--rollout.max_head_offpolicyness=4", "--rollout.segment_tokens=2")
    arguments = (
        *("train_configs/quickstart.toml", f"--job.dump_folder={run.folder}", *SMALL, *ahead),
        *("--checkpoint.enable", "--checkpoint.interval=100", "--grpo.stop_timeout_seconds=120"),
    )
    job.start(*arguments, "--training.steps=1000")
    run.wait_for_step(3)
    os.kill(run.process.pid, signal.SIGUSR1)  # what --signal=B:USR1@300 does
    assert run.finish() == -signal.SIGKILL, run.console[-6000:]
    assert job.queued_again == [JOB_ID]
    last = run.metrics[-1]["step"]
    # Slurm's own signals would have reached the rollout process as well.
    assert f"Stopped after step {last}. " in run.console
    assert "rollouts in flight are kept with it" in run.console, run.console[-6000:]
    run.wait_until_processes_end()
    first = run.console

    assert job.finish(*arguments, f"--training.steps={last + 1}") == 0, run.console[-6000:]
    assert [record["step"] for record in run.metrics] == list(range(1, last + 2))
    assert job.queued_again == [JOB_ID]
    # Each job has started a server of its own.
    assert " is registered" in first
    assert " is registered" in run.console.removeprefix(first)
    run.wait_until_processes_end()


def test_servers_at_their_time_limit_leave_the_run_and_are_queued_again(make_job, tmp_path):
    registry = tmp_path / "registry"
    job = make_job(
        "grpo_servers.slurm", GRPO_REGISTRY=str(registry), SERVER_KIND="embedded",
        SERVER_HOST="127.0.0.1", SERVER_RESTARTS="1",
    )  # fmt: skip
    job.start(MODEL, "--max-model-len", "256")
    job.run.wait_for(lambda: registry.is_dir() and any(registry.glob("*.json")))
    os.kill(job.run.process.pid, signal.SIGUSR1)
    assert job.run.finish() == -signal.SIGKILL, job.run.console
    assert job.queued_again == [JOB_ID]
    assert not list(registry.glob("*.json"))
    job.run.wait_until_processes_end()
