"""Children end with their owner, and with everything that they started, also in other sessions."""

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from light import LIGHT

from torchtitan.grpo.system.child import end_marked, start_child, stop_children
from torchtitan.grpo.system.environment import RUN_VARIABLE
from torchtitan.grpo.system.light_start import LIGHT_PYTHON


def wait_gone(pid: int) -> None:
    """Returns when the process has ended; fails after ten seconds."""
    if psutil.pid_exists(pid):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(timeout=10)


def test_a_child_that_ignores_the_signal_is_killed_with_its_own_children(tmp_path):
    program = textwrap.dedent("""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        print(grandchild.pid, flush=True)
        time.sleep(300)
    """)
    log = tmp_path / "log"
    child = start_child([sys.executable, "-c", program], log_file=log)
    while not (text := log.read_text()).endswith("\n"):
        assert child.poll() is None
    stop_children([child], grace_seconds=0.2)
    assert child.returncode == -9
    wait_gone(int(text))
    stop_children([child])


def test_a_child_ends_when_its_owner_is_killed():
    program = LIGHT + textwrap.dedent("""
        import sys
        from torchtitan.grpo.system.child import start_child
        child = start_child([sys.executable, "-c", "import time; time.sleep(300)"])
        print(child.pid, flush=True)
        sys.stdin.read()
    """)
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    pid = int(owner.stdout.readline())
    assert psutil.pid_exists(pid)
    owner.kill()
    owner.wait(timeout=10)
    owner.stdin.close()
    owner.stdout.close()
    wait_gone(pid)


def started(program: str, log: Path) -> tuple[subprocess.Popen, str]:
    """A child that runs ``program``, and the first line that it printed."""
    child = start_child([sys.executable, "-c", textwrap.dedent(program)], log_file=log)
    while not (text := log.read_text()).endswith("\n"):
        assert child.poll() is None, text
        time.sleep(0.01)
    return child, text.strip()


def test_a_child_has_the_grace_period_to_end_in_order(tmp_path):
    child, _ = started(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(7)))
        print("ready", flush=True)
        time.sleep(300)
        """,
        tmp_path / "log",
    )
    stop_children([child], grace_seconds=30.0)
    assert child.returncode == 7


def test_what_a_child_leaves_behind_ends_with_it(tmp_path):
    child, grandchild = started(
        """
        import signal, subprocess, sys, time
        sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        sleep += "print(flush=True); time.sleep(300)"
        process = subprocess.Popen([sys.executable, "-c", sleep], stdout=subprocess.PIPE)
        process.stdout.readline()  # it ignores SIGTERM from now on
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print(process.pid, flush=True)
        time.sleep(300)
        """,
        tmp_path / "log",
    )
    stop_children([child], grace_seconds=30.0)
    assert child.returncode == 0
    wait_gone(int(grandchild))


PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=sys.stdout).wait()
"""
CHILD = """
import os, signal, time
from torchtitan.grpo.system import child
{setup}
child.end_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "setup",
    ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN); child._PARENT_GRACE_SECONDS = 0.2"],
)
def test_a_process_ends_with_its_parent(setup: str):
    command = [sys.executable, "-c", PARENT, LIGHT + CHILD.format(setup=setup)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.wait(30)
        assert psutil.wait_procs([child], timeout=30)[1] == []
    finally:
        parent.stdout.close()
        if child.is_running():
            child.kill()


subreapers = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no subreapers")

SECONDS = 20.0
# Started by a shell in the session of a worker, which ends or is killed afterwards.
DAEMONS = {
    "background": "{sleep} &",
    "setsid": "setsid {sleep} &",
    "double fork": "( setsid sh -c '{sleep} & exit' & )",
    "SIGTERM ignored": "setsid sh -c 'trap \"\" TERM HUP INT; {sleep}; {sleep}' &",
    "starts another": "setsid sh -c 'while true; do {sleep} & wait; done' &",
    "stopped": "setsid {sleep} & sleep 0.1; kill -STOP $!",
    "python": "{python} -c 'import os, time; os.fork() and os._exit(0); os.setsid(); "
    'os.fork() and os._exit(0); os.execvp("sleep", "{sleep}".split())\'',
    "no environment": "env -i setsid {sleep} &",
}
OWNER = """
import os, subprocess, sys, time
from torchtitan.grpo.system.child import adopt_orphans, end_descendants
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


@subreapers
@pytest.mark.parametrize("name", DAEMONS)
def test_a_daemon_ends_with_its_owner(name: str, owner) -> None:
    process, sleep = owner(name, {})
    process.communicate("end\n", timeout=SECONDS)
    assert not running(sleep)


@subreapers
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


@subreapers
def test_daemons_that_have_ended_do_not_stay_zombies(owner) -> None:
    process, sleep = owner("setsid", {})
    (daemon,) = [p for p in running(sleep) if p.info["cmdline"][0] == "sleep"]
    assert daemon.ppid() == process.pid, "it was adopted"
    daemon.kill()
    wait_until(lambda: not psutil.pid_exists(daemon.pid))  # not even as a zombie
    assert process.poll() is None
