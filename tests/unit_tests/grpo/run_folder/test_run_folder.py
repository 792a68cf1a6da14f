# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What runs leave in their folder: found, removed, and what each start writes there."""

import json
import tomllib
from pathlib import Path

import pytest

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.run_folder.contents import describe_run, next_free_folder
from torchtitan.grpo.run_folder.replacing import move_aside
from torchtitan.grpo.run_folder.start_record import git_commit, record_start, to_toml, without_keys
from torchtitan.grpo.types import ServerInfo


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(tmp_path / "run")
    return config


def write(config: JobConfig, *names: str) -> None:
    for name in names:
        path = Path(config.job.dump_folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"step": 1}\n')


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_folder_holds_a_run_once_something_would_be_lost(config):
    assert describe_run(config) is None
    write(
        config, "rollout_process.log", "servers/embedded-0.log", "starts/1/config.toml", "mine.txt"
    )
    (Path(config.job.dump_folder) / "metrics.jsonl").touch()
    assert describe_run(config) is None, "a start that failed leaves nothing to keep"
    write(config, "metrics.jsonl")
    assert describe_run(config) == "metrics of 1 step"
    write(config, "hf/step-8/config.json", "hf/step-12/config.json", "checkpoint/step-4/.metadata")
    expected = "checkpoints (checkpoint) of step 4 and exports (hf) of step 8, 12"
    assert describe_run(config) == f"metrics of 1 step and {expected}"


def test_only_what_runs_have_written_is_replaced(config, tmp_path):
    foreign = (
        "notes.txt",
        "hf/mine/config.json",
        "checkpoint/seed/x",
        "tb/old/notes",
        "data.jsonl",
    )
    write(config, *foreign)
    write(
        config, "metrics.jsonl", "samples.jsonl", "ledger.jsonl", "evaluations.jsonl",
        "summary.json", "reward_curve.png", "rollout_process.log", "hf/step-4/config.json",
        "checkpoint/step-4/.metadata", "rollouts/step-4.msgpack", "servers/embedded-0.log",
        "starts/1/config.toml", "tb/20260101-0000/events.out.tfevents.1", "rollouts.jsonl",
    )  # fmt: skip
    config.rollout.record = str(tmp_path / "run/rollouts.jsonl")
    folder = Path(config.job.dump_folder)
    before = files_in(folder)
    aside = move_aside(config, keep=False)
    assert aside is not None
    left = {name for name in files_in(folder) if not name.startswith(aside.name)}
    assert left == set(foreign)
    assert files_in(aside) == before - left, "the earlier run is a run's folder of its own"
    assert not (folder / "rollouts").exists()
    assert move_aside(config, keep=False) is None


def test_the_next_free_folder_is_numbered(tmp_path):
    assert next_free_folder(str(tmp_path / "run")) == tmp_path / "run-2"
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-3").mkdir()
    assert next_free_folder(str(tmp_path / "run")) == tmp_path / "run-4"
    assert next_free_folder(str(tmp_path / "run-2")) == tmp_path / "run-4"
    assert str(next_free_folder("./outputs/x")) == "outputs/x-2"


def test_what_is_written_as_toml_is_read_back():
    tables = {
        "a": {
            "text": 'a "quoted" \\ line\nbreak \t é \x7f', "flag": True, "number": 3, "rate": 1e-05,
            "list": ["x", "y z"], "table": {"a key": 1, "b": "c"}, "empty": [],
        },
        "b": {"nothing": None, "api_key": "***"},
    }  # fmt: skip
    text = to_toml(tables)
    assert tomllib.loads(text) == {"a": tables["a"], "b": {}}
    assert "# nothing is not set" in text and "# api_key is set; its value is not kept" in text


def test_each_start_keeps_its_configuration_and_its_environment(config):
    config.inference.api_key = "secret"
    config.optimizer.lr = 3e-5
    arguments = [
        "--inference.api_key",
        "secret",
        "--inference.admin-key=secret",
        "--optimizer.lr=3e-5",
    ]
    servers = [ServerInfo("http://127.0.0.1:8000", "vllm", software="vLLM 0.32.0")]
    first = record_start(config, 0, arguments, servers)
    second = record_start(config, 40, arguments, [])
    assert (first.name, second.name) == ("1", "2")
    settings = tomllib.loads((second / "config.toml").read_text())
    assert settings["optimizer"]["lr"] == 3e-5
    assert "api_key" not in settings["inference"]
    found = json.loads((first / "environment.json").read_text())
    assert found["packages"].keys() >= {"torchtitan-grpo", "torch", "torchtitan", "transformers"}
    assert (found["first_step"], found["servers"][0]["kind"]) == (1, "vllm")
    assert found["servers"][0]["software"] == "vLLM 0.32.0"
    for file in (*first.iterdir(), *second.iterdir()):
        assert "secret" not in file.read_text()


def test_keys_on_a_command_line_are_masked():
    assert without_keys(["--inference.api_key", "x", "--a", "--inference.admin-key=y", "z"]) == [
        "--inference.api_key", "***", "--a", "--inference.admin-key=***", "z",
    ]  # fmt: skip


def test_the_commit_is_that_of_the_source_alone(tmp_path, repository):
    commit = git_commit(repository / "torchtitan/grpo")
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    assert git_commit(tmp_path) is None
