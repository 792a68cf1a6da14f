# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts the program of a benchmark on several ranks, on this machine's CPU.

The ranks are forked from one process that has imported torch and the package, as in the tests
(`tests/programs/fork_server.py`), because starting eight new processes would take a minute.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "programs"))

from forked import ForkServer


@cache
def fork_server() -> ForkServer:
    """Returns the fork server of this process, which ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def run_job(num_ranks: int, program: str, job: Any, *, timeout_seconds: float) -> Any:
    """Runs a program of this folder, which calls `answer_job`, on several ranks; returns its result."""
    with tempfile.TemporaryDirectory() as folder:
        file, result = Path(folder, "job.json"), Path(folder, "result.json")
        file.write_text(json.dumps(job))
        run_ranks(num_ranks, program, file, result, timeout_seconds=timeout_seconds)
        return json.loads(result.read_text())


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
