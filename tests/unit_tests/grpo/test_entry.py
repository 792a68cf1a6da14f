# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How a rank's process ends, whatever still runs in it."""

import subprocess
import sys

import pytest

LEAVE = "from torchtitan.grpo.entry import leave\nimport logging, sys, threading\n"
PATIENCE = 120.0


def leave(program: str) -> subprocess.CompletedProcess[str]:
    """What a process said, and its status, that defines and leaves through ``main``."""
    return subprocess.run(
        [sys.executable, "-c", f"{LEAVE}{program}\nleave(main)\nprint('still here')"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_ends_at_once_though_a_thread_of_it_waits_for_ever(status):
    # Python waits for such a thread at its end.
    process = leave(f"""
def main():
    threading.Thread(target=threading.Event().wait).start()
    sys.stdout.write("said")
    return {status}
""")
    assert (process.returncode, process.stdout) == (status, "said")


def test_what_is_held_back_is_written_before_the_end():
    process = leave("""
from logging.handlers import MemoryHandler
held = MemoryHandler(100, target=logging.StreamHandler(sys.stdout))
logging.getLogger().addHandler(held)
def main():
    logging.getLogger().warning("held back")
    return 0
""")
    assert (process.returncode, process.stdout) == (0, "held back\n")


def test_a_mistake_of_ours_is_shown_and_is_a_failure():
    process = leave("""
def main():
    raise KeyError("a mistake")
""")
    assert process.returncode == 1
    assert "KeyError: 'a mistake'" in process.stderr
    assert "still here" not in process.stdout
