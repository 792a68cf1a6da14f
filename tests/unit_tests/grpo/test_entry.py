# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How a rank's process ends, whatever still runs in it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import ForkServer

LEAVE = "from torchtitan.grpo.entry import leave\nimport logging, sys, threading\n"
PATIENCE = 120.0


@dataclass
class Ended:
    """How a process ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def leave(fork_server: ForkServer, tmp_path: Path) -> Callable[[str], Ended]:
    """Runs a program that defines ``main``, in a process that leaves through it."""

    def run(program: str) -> Ended:
        script = tmp_path / "program.py"
        script.write_text(f"{LEAVE}{program}\nleave(main)\nprint('still here')")
        out, err = tmp_path / "out", tmp_path / "err"
        with out.open("w") as output, err.open("w") as errors:
            process = fork_server.start(script, output=output, errors=errors)
        return Ended(process.wait(PATIENCE), out.read_text(), err.read_text())

    return run


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_ends_at_once_though_a_thread_of_it_waits_for_ever(status, leave):
    # Python waits for such a thread at its end.
    process = leave(f"""
def main():
    threading.Thread(target=threading.Event().wait).start()
    sys.stdout.write("said")
    return {status}
""")
    assert (process.returncode, process.stdout) == (status, "said")


def test_what_is_held_back_is_written_before_the_end(leave):
    process = leave("""
from logging.handlers import MemoryHandler
held = MemoryHandler(100, target=logging.StreamHandler(sys.stdout))
logging.getLogger().addHandler(held)
def main():
    logging.getLogger().warning("held back")
    return 0
""")
    assert (process.returncode, process.stdout) == (0, "held back\n")


def test_a_mistake_of_ours_is_shown_and_is_a_failure(leave):
    process = leave("""
def main():
    raise KeyError("a mistake")
""")
    assert process.returncode == 1
    assert "KeyError: 'a mistake'" in process.stderr
    assert "still here" not in process.stdout
