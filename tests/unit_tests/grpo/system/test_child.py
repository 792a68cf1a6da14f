# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Children end with their owner and with all that they started, and their logs stay small."""

import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from light import LIGHT

from torchtitan.grpo.inference.server_log import log_tail
from torchtitan.grpo.system import child as child_module
from torchtitan.grpo.system import log_limit
from torchtitan.grpo.system.child import child_command, end_marked, start_child, stop_children
from torchtitan.grpo.system.environment import RUN_VARIABLE
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

SECONDS = 20.0


def wait_gone(pid: int) -> None:
    if psutil.pid_exists(pid):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(timeout=SECONDS)


def started(program: str, log: Path) -> tuple[subprocess.Popen, int]:
    """Starts a child; returns it with the number that it prints."""
    child = start_child([sys.executable, "-c", textwrap.dedent(program)], log_file=log)
    while not (text := log.read_text()).endswith("\n"):
        assert child.poll() is None, text
        time.sleep(0.01)
    return child, int(text)


def test_a_child_that_ignores_the_signal_is_killed_with_its_own_children(tmp_path):
    child, grandchild = started(
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        print(grandchild.pid, flush=True)
        time.sleep(300)
        """,
        tmp_path / "log",
    )
    stop_children([child], grace_seconds=0.2)
    assert child.returncode == -9
    wait_gone(grandchild)
    stop_children([child])


def test_a_child_may_end_in_order_and_what_it_leaves_behind_ends_with_it(tmp_path):
    child, grandchild = started(
        """
        import signal, subprocess, sys, time
        sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        sleep += "print(flush=True); time.sleep(300)"
        process = subprocess.Popen([sys.executable, "-c", sleep], stdout=subprocess.PIPE)
        process.stdout.readline()  # it ignores SIGTERM from now on
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(7)))
        print(process.pid, flush=True)
        time.sleep(300)
        """,
        tmp_path / "log",
    )
    stop_children([child], grace_seconds=30.0)
    assert child.returncode == 7
    wait_gone(grandchild)


OF_PACKAGE = """
import sys
from torchtitan.grpo.system.child import start_child
child = start_child([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
sys.stdin.read()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
CHILD = """
import os, signal, time
from torchtitan.grpo.system import child
{}
child.end_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN); child._PARENT_GRACE_SECONDS = 0.2"


@pytest.mark.parametrize(
    "command",
    [[LIGHT + OF_PACKAGE], *([PARENT, LIGHT + CHILD.format(how)] for how in ("", IGNORE))],
    ids=["started by the package", "by others", "by others, SIGTERM ignored"],
)
def test_a_process_ends_when_its_parent_is_killed(command: list[str]):
    pipes: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", *command], text=True, **pipes) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
        wait_gone(pid)


subreapers = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no subreapers")

# Started by a shell in the session of a worker, which ends or is killed afterwards.
DAEMONS = {
    "double fork": "( setsid sh -c '{sleep} & exit' & )",
    "SIGTERM ignored": "setsid sh -c 'trap \"\" TERM HUP INT; {sleep}; {sleep}' &",
    "starts another": "setsid sh -c 'while true; do {sleep} & wait; done' &",
    "stopped": "setsid {sleep} & until [ $(cat /proc/$!/comm) = sleep ]; do :; done; kill -STOP $!",
    "no environment": "env -i setsid {sleep} &",
}
OWNER = """
import os, subprocess, sys
from torchtitan.grpo.system.child import adopt_orphans, end_descendants
adopt_orphans()
subprocess.Popen(["sh", "-c", sys.argv[1]], start_new_session=True).wait()
print("started", flush=True)
if sys.stdin.readline() == "end\\n":
    end_descendants()
os._exit(0)
"""


def running(sleep: str) -> list[psutil.Process]:
    """Returns the processes whose command line holds these words, which they still have in ``info``."""
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
    started: list[tuple[subprocess.Popen, str]] = []

    def start(name: str, environment: dict[str, str]) -> tuple[subprocess.Popen, str]:
        sleep = f"sleep 1000.{uuid.uuid4().int % 10**12}"
        (tmp_path / "owner_program.py").write_text(OWNER)
        owner = subprocess.Popen(
            [*LIGHT_PYTHON, "owner_program", DAEMONS[name].replace("{sleep}", sleep)],
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


@subreapers
@pytest.mark.parametrize("name", DAEMONS)
def test_a_daemon_ends_with_its_owner(name: str, owner) -> None:
    process, sleep = owner(name, {})
    process.communicate("end\n", timeout=SECONDS)
    assert not running(sleep)


@subreapers
def test_a_daemon_whose_owner_was_killed_is_found_by_its_mark(owner) -> None:
    mark = uuid.uuid4().hex
    process, sleep = owner("starts another", {RUN_VARIABLE: mark})
    other, other_sleep = owner("double fork", {RUN_VARIABLE: uuid.uuid4().hex})
    process.kill()
    process.wait()
    end_marked(mark)
    wait_until(lambda: not running(sleep))
    assert other.poll() is None and running(other_sleep), "it belongs to another run"


@subreapers
def test_daemons_that_have_ended_do_not_stay_zombies(owner) -> None:
    process, sleep = owner("double fork", {})
    (daemon,) = [p for p in running(sleep) if p.info["cmdline"][0] == "sleep"]
    wait_until(lambda: daemon.ppid() == process.pid)  # it is adopted
    daemon.kill()
    wait_until(lambda: not psutil.pid_exists(daemon.pid))  # not even as a zombie
    assert process.poll() is None


# -- logs -------------------------------------------------------------------------------------

LIMIT = 2**20
PRINTS = {
    "lines": "for i in range(80): print('x' * 99_999)",
    "one line": "print('x' * 8_000_000, end='')",
    "a grandchild": "import subprocess\nsubprocess.run(['head', '-c', '8000000', '/dev/zero'])",
}


@pytest.mark.parametrize("name", PRINTS)
def test_a_log_has_a_size_whatever_is_printed(name, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(log_limit, "MAX_LOG_BYTES", LIMIT)
    monkeypatch.setattr(log_limit, "_LOOK_SECONDS", 0.01)
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
    wait_until(lambda: "log-limit" not in {thread.name for thread in threading.enumerate()})


def test_a_program_that_is_not_there_is_refused_by_its_owner(tmp_path):
    (tmp_path / "text").write_text("")
    for name, error in (("absent", FileNotFoundError), ("text", PermissionError)):
        with pytest.raises(error, match=name):
            start_child([str(tmp_path / name)])


def test_what_a_child_inherits_is_what_its_program_gets():
    signals = ["grep", "SigIgn", "/proc/self/status"]  # Python would ignore some by itself
    expected = subprocess.run(signals, capture_output=True, text=True, timeout=SECONDS)
    program = """
    set -e
    grep SigIgn /proc/self/status
    [ $(cut -d ' ' -f 6 /proc/$$/stat) = $$ ]  # its session
    ulimit -t
    echo $KEPT
    """
    environment = os.environ | {"KEPT": "yes"}
    limits = {resource.RLIMIT_CPU: (77, 78)}
    found = subprocess.run(
        child_command(["sh", "-c", program], environment, limits=limits),
        env=environment, start_new_session=True, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert found.stdout == f"{expected.stdout}77\nyes\n", found.stderr


def test_no_hook_of_python_runs_between_fork_and_exec():
    """It may wait forever for a lock that another thread held during the fork."""
    package = Path(child_module.__file__).resolve().parents[1]
    assert not [file for file in package.rglob("*.py") if "preexec_fn=" in file.read_text()]
