# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a child prints does not fill the disk."""

import sys
import threading
import time
from pathlib import Path

import pytest

from torchtitan.grpo.inference.server_log import log_tail
from torchtitan.grpo.system import log_limit
from torchtitan.grpo.system.child import start_child, stop_children

SECONDS = 20.0
LIMIT = 2**20
PRINTS = {
    "lines": "for i in range(80): print('x' * 99_999)",
    "one line": "print('x' * 8_000_000, end='')",
    "a grandchild": "import subprocess\nsubprocess.run(['head', '-c', '8000000', '/dev/zero'])",
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_limit, "MAX_LOG_BYTES", LIMIT)
    monkeypatch.setattr(log_limit, "_LOOK_SECONDS", 0.01)


def wait_until(holds) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("name", PRINTS)
def test_a_log_has_a_size_whatever_is_printed(name: str, tmp_path: Path, caplog) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    code = (
        f"import pathlib, time\n{PRINTS[name]}\nwhile not pathlib.Path({str(go)!r}).exists():"
        f" time.sleep(0.01)\n{PRINTS[name]}\n"
        "time.sleep(0.3)\nprint('the last words', flush=True)"
    )
    child = start_child([sys.executable, "-c", code], log_file=log)
    try:
        wait_until(lambda: log.with_name("log.1").exists() and log.stat().st_size <= LIMIT)
        go.touch()
        child.wait(SECONDS)
    finally:
        stop_children([child])
    kept = log.with_name("log.1")
    assert log.stat().st_size <= LIMIT and kept.stat().st_size <= 3 * LIMIT
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "the last words" in log_tail(log) + log_tail(kept)
    told = [message for message in caplog.messages if "was larger than" in message]
    assert len(told) == 1 and str(log) in told[0]


def test_a_small_log_is_left_as_it_is_and_the_thread_ends(tmp_path: Path, caplog) -> None:
    log = tmp_path / "log"
    child = start_child([sys.executable, "-c", "print('hello')"], log_file=log)
    child.wait(SECONDS)
    stop_children([child])
    assert log.read_text() == "hello\n" and not caplog.messages
    wait_until(lambda: "log-limit" not in {thread.name for thread in threading.enumerate()})
