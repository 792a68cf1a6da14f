# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How a benchmark starts its program on several ranks, on this machine's CPU."""

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(num_ranks: int, program: str, *arguments: Path, timeout_seconds: float) -> None:
    """Runs a program of this folder under torchrun, to its end.

    Raises:
        SystemExit: It failed; with the end of what it printed.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc_per_node", str(num_ranks), str(Path(__file__).with_name(program))),
        *map(str, arguments),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_seconds
    )
    if done.returncode != 0:
        raise SystemExit(f"{num_ranks} ranks failed:\n{done.stdout[-3000:]}\n{done.stderr[-9000:]}")
