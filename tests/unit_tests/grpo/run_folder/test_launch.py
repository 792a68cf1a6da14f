# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A restart by a launcher is told from a start by the user, by what the launcher passes."""

import pytest

from torchtitan.grpo.run_folder.launch import is_first_attempt, is_restart, launch_id, note_launch

NAMES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
    *("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHTITAN_GRPO_LAUNCH_ID"),
)


def torchrun(run_id: str, count: int = 0, folder: str = "none_abc", attempt: int = 0):
    file = f"/tmp/torchelastic/{folder}/attempt_{attempt}/0/error.json"
    return {
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(count),
        "TORCHELASTIC_ERROR_FILE": file,
    }


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


@pytest.mark.parametrize(
    "content", ["", '{"laun', "[]", '{"launch": 3}', "\0" * 40, '{"launch": null}']
)
def test_a_damaged_note_names_no_launch(tmp_path, monkeypatch, content):
    set_environment(monkeypatch, torchrun("a"))
    note_launch(str(tmp_path))
    assert is_restart(str(tmp_path)) and is_first_attempt(str(tmp_path))
    (tmp_path / "starts/launch.json").write_text(content)
    assert not is_restart(str(tmp_path))
    assert not is_first_attempt(str(tmp_path)), "so that the run is kept"


def test_without_a_launcher_there_is_no_launch(monkeypatch):
    set_environment(monkeypatch, {})
    assert launch_id() is None
    set_environment(monkeypatch, {"TORCHELASTIC_RUN_ID": "none"})
    assert launch_id() is None
