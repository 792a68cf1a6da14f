# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Programs that user code starts in sessions of their own end with the process that owns them."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from torchtitan.grpo.system.descendants import end_marked
from torchtitan.grpo.system.environment import RUN_VARIABLE
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no subreapers")

SECONDS = 20.0
# Started by a shell in the session of a worker, which ends or is killed afterwards.
DAEMONS = {
    "background": "{sleep} &",
    "setsid": "setsid {sleep} &",
    "nohup": "nohup {sleep} >/dev/null 2>&1 &",
    "double fork": "( setsid sh -c '{sleep} & exit' & )",
    "SIGTERM ignored": "setsid sh -c 'trap \"\" TERM HUP INT; {sleep}; {sleep}' &",
    "starts another": "setsid sh -c 'while true; do {sleep} & wait; done' &",
    "other folder": "cd / && setsid {sleep} </dev/null >/dev/null 2>&1 &",
    "stopped": "setsid {sleep} & sleep 0.1; kill -STOP $!",
    "python": "{python} -c 'import os, time; os.fork() and os._exit(0); os.setsid(); "
    'os.fork() and os._exit(0); os.execvp("sleep", "{sleep}".split())\'',
    "no environment": "env -i setsid {sleep} &",
}
OWNER = """
import os, subprocess, sys, time
from torchtitan.grpo.system.descendants import adopt_orphans, end_descendants
adopt_orphans()
worker = subprocess.Popen(["sh", "-c", sys.argv[1]], start_new_session=True)
worker.wait()
print("started", flush=True)
if sys.stdin.readline() == "end\\n":
    end_descendants()
os.abort() if sys.argv[2:] else os._exit(0)
"""


def running(sleep: str) -> list[psutil.Process]:
    """Returns the processes whose command line holds these words, which they still have in ``info``.

    They may end at any moment, so that asking them again would fail.
    """
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
        if not is_zombie and sleep in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def owner(tmp_path: Path):
    """Starts a daemon under an owner; returns the owner and the daemon's words."""
    started: list[tuple[subprocess.Popen, str]] = []

    def start(name: str, environment: dict[str, str]) -> tuple[subprocess.Popen, str]:
        script, sleep = tmp_path / "owner.py", f"sleep 1000.{uuid.uuid4().int % 10**12}"
        script.write_text(OWNER)
        (tmp_path / "owner_program.py").write_text(OWNER)
        command = DAEMONS[name].replace("{sleep}", sleep).replace("{python}", sys.executable)
        owner = subprocess.Popen(
            [*LIGHT_PYTHON, "owner_program", command],
            cwd=tmp_path, env=os.environ | environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append((owner, sleep))
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        wait_until(lambda: any(p.info["cmdline"][0] == "sleep" for p in running(sleep)))
        return owner, sleep

    yield start
    for process, sleep in started:
        process.kill()
        for left in running(sleep):
            left.kill()
        process.communicate()  # to the end of the output, which a daemon would hold open


@pytest.mark.parametrize("name", DAEMONS)
def test_a_daemon_ends_with_its_owner(name: str, owner) -> None:
    process, sleep = owner(name, {})
    process.communicate("end\n", timeout=SECONDS)
    assert not running(sleep)


@pytest.mark.parametrize("name", ["double fork", "starts another", "stopped"])
def test_a_daemon_whose_owner_was_killed_is_found_by_its_mark(name: str, owner) -> None:
    mark = uuid.uuid4().hex
    process, sleep = owner(name, {RUN_VARIABLE: mark})
    other, other_sleep = owner("setsid", {RUN_VARIABLE: uuid.uuid4().hex})
    process.kill()
    process.wait()
    end_marked(mark)
    wait_until(lambda: not running(sleep))
    assert other.poll() is None and running(other_sleep), "it belongs to another run"


def test_daemons_that_have_ended_do_not_stay_zombies(owner) -> None:
    process, sleep = owner("setsid", {})
    (daemon,) = [p for p in running(sleep) if p.info["cmdline"][0] == "sleep"]
    assert daemon.ppid() == process.pid, "it was adopted"
    daemon.kill()
    wait_until(lambda: not psutil.pid_exists(daemon.pid))  # not even as a zombie
    assert process.poll() is None
