# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A log that cannot be written loses nothing, and does not end the run."""

import json
import sys
from pathlib import Path

import pytest

from torchtitan.grpo.observe.run_log import RunLog


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_what_a_full_disk_refused_is_written_once_there_is_room(tmp_path: Path, caplog) -> None:
    path = tmp_path / "metrics.jsonl"
    log = RunLog(path, 0)
    log.add({"step": 1})
    stream = log._stream
    log._stream = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    log.add({"step": 2})
    log.add({"step": 3})
    assert [record.message for record in caplog.records if "No space left" in record.message] == [
        f"{path} cannot be written now (No space left on device). Training goes on, and what is "
        "missing there is written as soon as there is room."
    ], "said once"
    log._stream.close()
    log._stream = stream
    log.add({"step": 4})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_records_that_never_found_room_are_told_at_the_end(tmp_path: Path, caplog) -> None:
    path = tmp_path / "metrics.jsonl"
    log = RunLog(path, 0)
    log._stream.close()
    log._stream = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    for step in (1, 2):
        log.add({"step": step})
    assert [record["step"] for record in log.read()] == [1, 2], "the summary counts them"
    log.close()
    assert caplog.messages[-1].startswith(f"{path} lacks its last 2 records")


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2',
        b'{"step": "2"}\n',
        b"[2]\n",
        b"\xff\xfe{}\n",
        b'{"stfp": 2}\n',
        b"null\n",
        b"\n",
    ],
)
def test_a_line_that_is_damaged_is_told_and_the_others_are_kept(
    tmp_path: Path, caplog, line
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + (b'{"step": 3}\n' if line.endswith(b"\n") else b""))
    log = RunLog(path, 3)
    assert [record["step"] for record in log.read()] == ([1, 3] if line.endswith(b"\n") else [1])
    log.close()
    assert f"{path}:2 is damaged or incomplete, and is left out." in caplog.messages
