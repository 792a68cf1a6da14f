"""Signals that a training rank gets, also while its main thread is out of reach."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan.grpo.system.light_start import LIGHT_PYTHON

# A mutex that is locked twice: like a collective that waits for a rank that is gone, this
# wait is not cut short by a signal, so no handler written in Python runs.
BLOCKED = """
import ctypes, sys
from torchtitan.grpo.system.stop import StopRequest
stop = StopRequest(float(sys.argv[1]))
print("ready", flush=True)
mutex, libc = ctypes.create_string_buffer(128), ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""
WAITING = """
import sys
from torchtitan.grpo.system.stop import StopRequest
stop = StopRequest(float(sys.argv[1]))
assert not stop.is_older_than(0)
print("ready", flush=True)
assert stop.wait(120)
assert stop.is_older_than(0) and not stop.is_older_than(1000)
print("asked", flush=True)
if sys.argv[2:]:
    sys.stdin.readline()
sys.exit(stop.exit_code)
"""
# Busy, as in a training step.
LISTENING = """
import sys, threading
from torchtitan.grpo.system.stop import StopRequest
stop = StopRequest(float(sys.argv[1]))
stop.on_hangup(lambda: print("again in", threading.current_thread().name, flush=True))
print("ready", flush=True)
while not stop.requested:
    sum(range(1000))
"""


def _start(program: str, tmp_path: Path, timeout_seconds: float, *more: str) -> subprocess.Popen:
    (tmp_path / "program.py").write_text(program)
    process = subprocess.Popen(
        [*LIGHT_PYTHON, "program", str(timeout_seconds), *more],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Under nohup the tests ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="the mutex is Linux's")
def test_a_rank_stuck_in_foreign_code_still_ends(tmp_path):
    process = _start(BLOCKED, tmp_path, 0.2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "grpo.stop_timeout_seconds" in errors


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_repeated_signals_are_one_request(tmp_path, signum):
    process = _start(WAITING, tmp_path, 60)
    for _ in range(3):
        process.send_signal(signum)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (128 + signum, "asked\n", "")


def test_a_hangup_calls_back_each_time_and_ends_nothing(tmp_path):
    process = _start(LISTENING, tmp_path, 60)
    assert process.stdout is not None
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "again in stop-watch\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_a_hangup_that_nobody_asked_for_ends_the_process(tmp_path):
    process = _start(WAITING, tmp_path, 60)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGHUP


def test_a_rank_has_the_whole_timeout_to_end_in_order(tmp_path):
    process = _start(WAITING, tmp_path, 120, "and a line of input")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    time.sleep(0.5)  # longer than a rank without a timeout would live
    assert process.communicate("\n", timeout=60) == ("", "")
    assert process.returncode == 128 + signal.SIGTERM


def test_a_rank_stops_when_torchrun_has_died(tmp_path):
    (tmp_path / "program.py").write_text(WAITING.replace("stop.exit_code", "0").replace(
        'print("asked"', 'open("noticed", "w").write(str(stop.exit_code))\nprint("asked"'
    ))  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])",
         *LIGHT_PYTHON, "program", "60"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TORCHELASTIC_RUN_ID": "a-run"},
    )  # fmt: skip
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    parent.wait()
    # The rank keeps the pipe open until it ends.
    assert parent.stdout.read() == "asked\n"
    parent.stdout.close()
    assert (tmp_path / "noticed").read_text() == str(128 + signal.SIGTERM)
