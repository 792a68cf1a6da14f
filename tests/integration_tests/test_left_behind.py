# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What stays of a run whose processes are killed with SIGKILL."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

PATIENCE_SECONDS = 120.0


def _wait(holds, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _waits_for_a_writer(process: psutil.Process) -> bool:
    with contextlib.suppress(OSError):
        return "partner" in Path(f"/proc/{process.pid}/wchan").read_text()
    return False


def test_a_rank_that_hangs_in_opening_a_file_ends_with_torchrun(tmp_path: Path):
    fifo = tmp_path / "config.toml"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "torchtitan_grpo"]
    command += ["--nproc_per_node=1", "-m", "torchtitan.grpo_train", f"--job.config_file={fifo}"]
    agent = psutil.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    ranks: list[psutil.Process] = []
    try:
        _wait(lambda: agent.children() or agent.poll() is not None, "torchrun must start its rank")
        ranks = agent.children()
        assert ranks, agent.stderr.read()
        _wait(lambda: _waits_for_a_writer(ranks[0]), "the rank must open the file")
        agent.kill()
        assert psutil.wait_procs(ranks, timeout=30)[1] == [], "the rank must end with torchrun"
    finally:
        for process in (agent, *ranks):
            with contextlib.suppress(psutil.Error):
                process.kill()
        agent.wait(30)
        agent.stderr.close()
