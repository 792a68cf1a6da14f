# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A restart by torchrun is told from a start by the user."""

import json
from pathlib import Path

import pytest

from torchtitan.grpo.run_folder.launch import is_restart


@pytest.fixture
def record(tmp_path: Path):
    def write(number: int, launch: str | None) -> None:
        folder = tmp_path / f"starts/{number}"
        folder.mkdir(parents=True)
        (folder / "environment.json").write_text(json.dumps({"launch": launch}))

    return write


@pytest.mark.parametrize(
    ("launches", "run_id", "count", "expected"),
    [
        ([], "a", "1", False),  # the ranks died before the first start was recorded
        (["a"], "a", "0", True),  # a node joined: restarts are not counted then
        (["a"], "b", "0", False),
        (["a", "b"], "a", "0", False),  # another launch has gone on with the run meanwhile
        (["b"] * 9 + ["a"], "a", "0", True),  # the tenth start, which is not the last by name
        ([None], None, "0", False),
        ([None], "none", "0", False),
        ([None], "none", "1", True),
    ],
)
def test_starts_of_one_torchrun_have_its_rendezvous_id(
    tmp_path, monkeypatch, record, launches, run_id, count, expected
):
    for number, launch in enumerate(launches, start=1):
        record(number, launch)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert is_restart(str(tmp_path)) is expected


def test_a_record_that_was_cut_off_is_no_restart(tmp_path, monkeypatch, record):
    record(1, "a")
    (tmp_path / "starts/1/environment.json").write_text('{"laun')
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert not is_restart(str(tmp_path))
