# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A log loses nothing by a full disk, a resume or a damaged line."""

import json
import sys
from pathlib import Path

import pytest

from torchtitan.grpo.observe import run_log
from torchtitan.grpo.observe.run_log import NewRecords, RunLog
from torchtitan.grpo.observe.summary import (
    RunOutcome,
    numbers_of,
    summarize,
    summarize_supervised,
)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("has_room_again", [True, False])
def test_what_a_full_disk_refused_is_written_once_there_is_room(tmp_path, caplog, has_room_again):
    path = tmp_path / "metrics.jsonl"
    log = RunLog(path, 0)
    log.add({"step": 1})
    stream = log._stream
    log._stream = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    log.add({"step": 2})
    log.add({"step": 3})
    told = [message for message in caplog.messages if "No space left" in message]
    assert told == [
        f"{path} cannot be written now (No space left on device). Training goes on, and what is "
        "missing there is written as soon as there is room."
    ], "said once"
    assert [record["step"] for record in log.read()] == [1, 2, 3], "the summary counts them"
    if has_room_again:
        log._stream.close()
        log._stream = stream
        log.add({"step": 4})
    log.close()
    found = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    if has_room_again:
        assert found == [1, 2, 3, 4]
    else:
        stream.close()
        assert found == [1]
        assert caplog.messages[-1].startswith(f"{path} lacks its last 2 records")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_what_waits_for_room_does_not_fill_the_memory(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(run_log, "_MOST_UNWRITTEN", 30)
    path = tmp_path / "samples.jsonl"
    log = RunLog(path, 0)
    stream = log._stream
    log._stream = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    for step in range(1, 10):
        log.add({"step": step})
    log._stream.close()
    log._stream = stream
    log.add({"step": 10})
    log.close()
    found = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert found == [1, 2, 3, 10]
    assert caplog.messages[-1] == f"{path} lacks 6 records of a full disk."


DAMAGED = [
    b'{"step": 2', b'{"step": "2"}\n', b"[2]\n", b"\xff\xfe{}\n", b'{"stfp": 2}\n', b"null\n", b"\n",
]  # fmt: skip


@pytest.mark.parametrize("line", DAMAGED)
def test_a_line_that_is_damaged_is_told_and_the_others_are_kept(tmp_path: Path, caplog, line):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + (b'{"step": 3}\n' if line.endswith(b"\n") else b""))
    log = RunLog(path, 3)
    assert [record["step"] for record in log.read()] == ([1, 3] if line.endswith(b"\n") else [1])
    log.close()
    assert f"{path}:2 is damaged or incomplete, and is left out." in caplog.messages


@pytest.mark.parametrize("value", ['"0.5"', "[0.5]", '{"mean": 0.5}', '"inf"', "{}"])
def test_metrics_that_are_no_numbers_are_told_and_left_out(tmp_path: Path, caplog, value):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "reward/mean": 1e999}\n'
        f'{{"step": 2, "reward/mean": {value}}}\n'
        '{"step": 3, "reward/mean": null}\n'
        f'{{"step": 4, "reward/mean": {10**400}}}\n'
    )
    log = RunLog(path, 4)
    steps = log.read()
    log.close()
    assert [record["step"] for record in steps] == [1, 3, 4]
    assert f"{path}:2 is damaged or incomplete, and is left out." in caplog.messages
    assert numbers_of(steps, "reward/mean") == []
    outcome = RunOutcome(4, 1.0, 4, 0, tmp_path)
    for describe in (summarize, summarize_supervised):  # other keys may be missing
        assert describe(outcome, steps, [{"step": 1}]), "the end of a run is not lost"


def test_a_resumed_run_continues_its_records_where_the_checkpoint_was(tmp_path):
    file = tmp_path / "metrics.jsonl"
    log = RunLog(file, 0)
    for step in (1, 2, 3):
        log.add({"step": step})
    log.close()
    with file.open("a") as half:
        half.write('{"step": 4, "rew')
    resumed = RunLog(file, 2)
    resumed.add({"step": 3, "again": True})
    resumed.close()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert records == resumed.read() == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    RunLog(file, 0).close()
    assert not file.exists(), "an empty file says nothing"


def test_a_log_that_stayed_empty_leaves_the_file_of_another_run(tmp_path):
    log = RunLog(tmp_path / "samples.jsonl", 0)
    other = RunLog(tmp_path / "samples.jsonl", 0)  # replaces the file
    log.close()
    other.add({"step": 1})
    other.close()
    assert other.read() == [{"step": 1}]


def test_another_process_takes_each_record_of_a_run_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = NewRecords(path)
    assert reader.take() == []
    log = RunLog(path, 0)
    log.add({"step": 1})
    log.add({"step": 2})
    assert [record["step"] for record in reader.take()] == [1, 2]
    with path.open("ab") as stream:
        stream.write(b'{"step": ')
        stream.flush()
        assert reader.take() == []
        stream.write(b"3}\n")
    assert reader.take() == [{"step": 3}]
    log.close()
    reader.close()
    # A resumed run takes the steps since its checkpoint again.
    later = NewRecords(path)
    log = RunLog(path, 1)
    assert later.take() == []
    log.add({"step": 2, "seconds": 1.5})
    assert later.take() == [{"step": 2, "seconds": 1.5}]
    log.close()
    # So do ranks that are started again. A run that replaces another one begins an empty file.
    RunLog(path, 2).close()
    assert later.take() == []
    path.rename(tmp_path / "moved.jsonl")
    log = RunLog(path, 0)
    log.add({"step": 1, "seconds": 2.5})
    assert later.take() == [{"step": 1, "seconds": 2.5}]
    log.close()
    later.close()
