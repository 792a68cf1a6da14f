# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A run's folder is of one run, a restart is told from another start, and what starts leave is found."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.run_folder.contents import describe_run, next_free_folder
from torchtitan.grpo.run_folder.folder import (
    FolderError,
    RunFolder,
    check_folder,
    describe_folder,
    hold,
)
from torchtitan.grpo.run_folder.launch import is_first_attempt, is_restart, note_launch
from torchtitan.grpo.run_folder.replacing import move_aside
from torchtitan.grpo.run_folder.start_record import git_commit, record_start, to_toml
from torchtitan.grpo.system.folder_lock import FolderInUse
from torchtitan.grpo.types import ServerInfo


def make_config(folder: Path | str) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.grpo.stop_timeout_seconds = -2.0  # a wait is not what is tested
    return config


@pytest.mark.parametrize(
    "name",
    [
        "/proc/x/y", "/sys/x", "/dev/null/x", "{tmp}/file", "{tmp}/file/x", "{tmp}/loop/x",
        "{tmp}/dangling", "{tmp}/new/" + "y" * 256, "{tmp}/nul\0", " ", "~other/x", "s3://bucket/x",
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_is_refused_by_the_check_and_by_the_start(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    config = make_config(name.format(tmp=tmp_path))
    before = sorted(tmp_path.iterdir())
    try:
        check_folder(config)
        # This user may not, and another one may.
        messages = [line.removeprefix("warning: ") for line in describe_folder(config)]
    except FolderError as error:
        messages = [str(error)]
    with pytest.raises(FolderError) as refused:
        RunFolder(config)
    messages.append(str(refused.value))
    assert len(messages) == 2
    for message in messages:
        assert message.startswith("job.dump_folder must be a folder that this user can make and")
        assert config.job.dump_folder in message
        assert "\n" not in message
    assert {p for p in tmp_path.iterdir() if p.name != "new"} == set(before)


@pytest.mark.parametrize("exists", [True, False])
def test_a_check_takes_no_lock_and_leaves_nothing(tmp_path, monkeypatch, exists):
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    config = make_config(folder)
    check_folder(config)
    assert list(describe_folder(config)) == []
    assert list(tmp_path.rglob("*")) == ([folder] if exists else [])
    monkeypatch.setattr(os, "access", lambda *_: False)  # as of a user other than root
    if exists:
        check_folder(config)
        (line,) = describe_folder(config)
        assert line.startswith("warning: job.dump_folder must be") and "Permission denied" in line


def test_what_a_run_writes_elsewhere_is_locked_as_well(tmp_path):
    first, second = make_config(tmp_path / "first"), make_config(tmp_path / "second")
    holder = RunFolder(first)
    RunFolder(second).close(failed=False)
    holder.close(failed=False)
    for config in (first, second):
        config.checkpoint.enable, config.checkpoint.folder = True, str(tmp_path / "checkpoints")
    holder = RunFolder(first)
    with pytest.raises(FolderInUse, match=r"checkpoint\.folder = "):
        RunFolder(second)
    second.checkpoint.folder = "checkpoint"
    RunFolder(second).close(failed=False)
    holder.close(failed=False)
    for config in (first, second):
        config.checkpoint.folder, config.rollout.record = "checkpoint", str(tmp_path / "r.jsonl")
    holder = RunFolder(first)
    with pytest.raises(FolderInUse, match=r"rollout\.record = "):
        RunFolder(second)
    holder.close(failed=False)
    for config in (first, second):
        config.rollout.record, config.weight_sync.transport = None, "disk"
        config.weight_sync.disk_path = str(Path(first.job.dump_folder) / "versions")
    holder = RunFolder(first)
    with pytest.raises(FolderInUse, match=r"weight_sync\.disk_path = "):
        RunFolder(second)
    holder.close(failed=False)
    assert not list(tmp_path.rglob("*.lock"))


@pytest.mark.parametrize("other", ["./run", "link", "run/../run"])
def test_a_folder_is_held_by_whatever_name(tmp_path, monkeypatch, other):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    held = RunFolder(make_config("run"))
    with pytest.raises(FolderInUse):
        RunFolder(make_config(other))
    (line,) = describe_folder(make_config(other))
    assert f"is in use by process {os.getpid()}" in line
    held.close(failed=True)
    RunFolder(make_config(other)).close(failed=False)


def test_an_evaluation_holds_its_own_folder_alone(tmp_path):
    config = make_config(tmp_path / "run")
    run = RunFolder(config)
    evaluation = hold(config, tmp_path / "run/evaluate/step-4")
    with pytest.raises(FolderInUse, match="evaluate/step-4 can be written by one process"):
        hold(config, tmp_path / "run/evaluate/step-4")
    hold(config, tmp_path / "run/evaluate/step-8").close()
    evaluation.close()
    run.close(failed=False)


NAMES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
    *("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHTITAN_GRPO_LAUNCH_ID"),
)


def torchrun(run_id: str, count: int = 0, folder: str = "none_abc", attempt: int = 0):
    file = f"/tmp/torchelastic/{folder}/attempt_{attempt}/0/error.json"
    return dict(zip(NAMES, (run_id, str(count), file), strict=False))


def slurm(job: str, count: int | None = None):
    counted = {} if count is None else {"SLURM_RESTART_COUNT": str(count)}
    return {"SLURM_JOB_ID": job, **counted}


def named(launch: str):
    return {"TORCHTITAN_GRPO_LAUNCH_ID": launch}


def set_environment(monkeypatch, variables: dict[str, str]) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        # The ranks died before their run had anything in the folder.
        ([torchrun("a", 1)], False),
        ([torchrun("a"), torchrun("a", 1)], True),
        ([torchrun("a"), torchrun("a")], True),  # a node joined: restarts are not counted then
        ([torchrun("a", 3), torchrun("a")], True),  # rank 0 is below an agent that joined later
        ([torchrun("a"), torchrun("b")], False),
        ([torchrun("a"), torchrun("b", 1)], False),
        # Another launch has gone on with the run meanwhile.
        ([torchrun("a"), torchrun("b"), torchrun("a", 1)], False),
        # A static rendezvous and one on a single host, whose agents have a folder each.
        ([torchrun("none"), torchrun("none", 1, attempt=1)], True),
        ([torchrun("none"), torchrun("none", folder="none_xyz")], False),
        ([torchrun("none"), torchrun("none", 1, folder="none_xyz", attempt=1)], False),
        ([{}, {}], False),  # no launcher
        ([torchrun("a"), {}], False),
        # A requeued job of Slurm, whose torchrun is another one.
        ([torchrun("a") | slurm("7"), torchrun("b") | slurm("7", 1)], True),
        ([slurm("7"), slurm("7", 2)], True),
        ([slurm("7"), slurm("7")], False),  # two starts in one interactive job
        ([slurm("7"), slurm("8", 1)], False),
        # Another scheduler that names the run.
        ([torchrun("a") | named("job"), torchrun("b") | named("job")], True),
        ([torchrun("a") | named("job"), torchrun("a") | named("another")], False),
    ],
)
def test_a_restart_is_told_by_what_its_launcher_passes(tmp_path, monkeypatch, starts, expected):
    for variables in starts[:-1]:
        set_environment(monkeypatch, variables)
        note_launch(str(tmp_path))
    set_environment(monkeypatch, starts[-1])
    assert is_restart(str(tmp_path)) is expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        (torchrun("a"), True),
        (torchrun("a", 1), False),
        (torchrun("none", 2), False),
        (slurm("7", 0), True),
        (slurm("7", 1) | torchrun("a"), False),
    ],
)
def test_a_later_attempt_is_told_by_its_number(tmp_path, monkeypatch, variables, expected):
    set_environment(monkeypatch, variables)
    assert is_first_attempt(str(tmp_path)) is expected


@pytest.mark.parametrize("content", ["", '{"laun', '{"launch": 3}', "\0" * 40])
def test_a_damaged_note_names_no_launch(tmp_path, monkeypatch, content):
    set_environment(monkeypatch, torchrun("a"))
    note_launch(str(tmp_path))
    assert is_restart(str(tmp_path)) and is_first_attempt(str(tmp_path))
    (tmp_path / "starts/launch.json").write_text(content)
    assert not is_restart(str(tmp_path))
    assert not is_first_attempt(str(tmp_path)), "so that the run is kept"


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    return make_config(tmp_path / "run")


def write(config: JobConfig, *names: str) -> None:
    for name in names:
        path = Path(config.job.dump_folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"step": 1}\n')


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_folder_holds_a_run_once_something_would_be_lost(config):
    assert describe_run(config) is None
    write(config, "rollout_process.log", "servers/a.log", "starts/1/config.toml", "mine.txt")
    (Path(config.job.dump_folder) / "metrics.jsonl").touch()
    assert describe_run(config) is None, "a start that failed leaves nothing to keep"
    write(config, "metrics.jsonl")
    assert describe_run(config) == "metrics of 1 step"
    write(config, "hf/step-8/config.json", "hf/step-12/config.json", "checkpoint/step-4/.metadata")
    expected = "checkpoints (checkpoint) of step 4 and exports (hf) of step 8, 12"
    assert describe_run(config) == f"metrics of 1 step and {expected}"


def test_only_what_runs_have_written_is_replaced(config, tmp_path):
    foreign = {
        "notes.txt",
        "hf/mine/config.json",
        "checkpoint/seed/x",
        "tb/old/notes",
        "data.jsonl",
    }
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
    assert left == foreign
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
    text = to_toml(tables, tables)
    assert "# default:" not in text
    assert tomllib.loads(text) == {"a": tables["a"], "b": {}}
    assert "# nothing is not set" in text and "# api_key is set; its value is not kept" in text


def test_each_start_keeps_its_configuration_and_its_environment(config, tmp_path):
    config.inference.api_key = "secret"
    config.optimizer.lr = 3e-5
    arguments = ["--inference.api_key", "secret", "--inference.admin-key=secret"]
    servers = [ServerInfo("http://127.0.0.1:8000", "vllm", software="vLLM 0.32.0")]
    first = record_start(config, 0, arguments, servers)
    second = record_start(config, 40, arguments, [])
    assert (first.name, second.name) == ("1", "2")
    settings = tomllib.loads((second / "config.toml").read_text())
    assert settings["optimizer"]["lr"] == 3e-5
    lines = (second / "config.toml").read_text().splitlines()
    assert "lr = 3e-05  # default: 1e-06" in lines
    marked = [line for line in lines if "# default: " in line and "dump_folder" not in line]
    assert len(marked) < 8, marked  # what this test and its configuration have set
    assert "api_key" not in settings["inference"]
    found = json.loads((first / "environment.json").read_text())
    assert found["packages"].keys() >= {"torchtitan-grpo", "torch", "torchtitan", "transformers"}
    assert (found["first_step"], found["servers"][0]["kind"]) == (1, "vllm")
    assert found["servers"][0]["software"] == "vLLM 0.32.0"
    for file in (*first.iterdir(), *second.iterdir()):
        assert "secret" not in file.read_text()
    assert git_commit(tmp_path) is None
