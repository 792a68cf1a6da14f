# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A process that watches its parent ends when the parent is killed, also if it ignores SIGTERM."""

import subprocess
import sys

import psutil
import pytest
from light import LIGHT

PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=sys.stdout).wait()
"""
CHILD = """
import os, signal, time
from torchtitan.grpo.system import parent_watch
{setup}
parent_watch.end_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "setup",
    ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN); parent_watch._GRACE_SECONDS = 0.2"],
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
