"""Signals that a training rank gets, also while its main thread is out of reach."""

import contextlib
import os
import signal
import subprocess
import sys
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
assert not stop.is_older_than(0) and stop.seconds_left == float("inf")
print("ready", flush=True)
assert stop.wait(120)
assert stop.is_older_than(0) and not stop.is_older_than(1000)
assert 0 < stop.seconds_left < stop.timeout_seconds
print("asked", flush=True)
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


def _start(
    program: str, tmp_path: Path, timeout_seconds: float, hangup: signal.Handlers = signal.SIG_DFL
) -> subprocess.Popen:
    (tmp_path / "program.py").write_text(program)
    process = subprocess.Popen(
        [*LIGHT_PYTHON, "program", str(timeout_seconds)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Under nohup the tests ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
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


@pytest.mark.parametrize(
    ("signum", "counts_as"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_repeated_signals_are_one_request(tmp_path, signum, counts_as):
    process = _start(WAITING, tmp_path, 60)
    for _ in range(3):
        process.send_signal(signum)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (128 + counts_as, "asked\n", "")


def test_under_nohup_a_hangup_asks_for_nothing(tmp_path):
    process = _start(WAITING, tmp_path, 60, signal.SIG_IGN)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("asked\n", "")
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hangup_calls_back_each_time_and_ends_nothing(tmp_path, hangup):
    process = _start(LISTENING, tmp_path, 60, hangup)
    assert process.stdout is not None
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "again in stop-watch\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


PRINTING = """
import sys
from torchtitan.grpo.system.logs import outlive_readers
outlive_readers()
sys.stdin.readline()
for _ in range(3):
    print("x" * 10_000, flush=True)
    print("y", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("output", ["pipe", "full pipe", "terminal", "full disk", "closed"])
def test_what_nobody_reads_ends_no_process(tmp_path, output):
    (tmp_path / "program.py").write_text(PRINTING)
    reader, writer = os.openpty() if output == "terminal" else os.pipe()
    if output == "full pipe":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 1000)
    target = os.open("/dev/full", os.O_WRONLY) if output == "full disk" else writer
    process = subprocess.Popen(
        ["bash", "-c", '"$@"' + " >&- 2>&-" * (output == "closed"), "", *LIGHT_PYTHON, "program"],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=target, stderr=target,
    )  # fmt: skip
    os.close(writer)
    if output != "full pipe":
        os.close(reader)  # the program prints after this
    assert process.stdin is not None
    process.communicate(b"go\n", timeout=60)
    assert process.returncode == 7
    if output == "full pipe":
        os.close(reader)
