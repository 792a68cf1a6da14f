"""Children end with their owner, and with everything that they started."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
from light import LIGHT

from torchtitan.grpo.system.child import start_child, stop_children


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
