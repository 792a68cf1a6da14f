# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts the program of a benchmark on several ranks, on this machine's CPU.

The ranks are forked from one process that has imported torch and the package, as in the tests
(`tests/programs/fork_server.py`), because starting eight new processes would take a minute.
"""

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "programs"))

from forked import ForkServer


@cache
def fork_server() -> ForkServer:
    """Returns the fork server of this process, which ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def run_ranks(num_ranks: int, program: str, *arguments: Path, timeout_seconds: float) -> None:
    """Runs a program of this folder on several ranks and waits for its end.

    Raises:
        SystemExit: If the program fails or takes longer than ``timeout_seconds``. The message
            holds the end of its output.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryFile("w+") as output:
        process = fork_server().start(
            Path(__file__).with_name(program),
            [str(argument) for argument in arguments],
            num_ranks=num_ranks,
            environment=environment,
            output=output,
        )
        try:
            end = f"with status {process.wait(timeout_seconds)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            end = f"after {timeout_seconds:g} s, the time limit"
        if process.returncode != 0:
            output.seek(0)
            raise SystemExit(f"{num_ranks} ranks ended {end}:\n{output.read()[-12000:]}")
