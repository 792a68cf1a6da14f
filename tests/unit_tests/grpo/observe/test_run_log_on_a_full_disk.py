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
