# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ranks that have ended for good are not started again; those that died are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from light import LIGHT

# The agent runs the module of the training ranks, which stands here for the file that is named.
STAND_IN = """
import sys
from torch.distributed.launcher import api
from torchtitan.grpo.start.torchrun import run_ranks

real = api.launch_agent
api.launch_agent = lambda config, entry, args, **kw: real(config, entry, sys.argv[1:], **kw)
sys.exit(run_ranks([], 1, 5.0, max_restarts=2))
"""
RANK = "import sys; open(sys.argv[1], 'a').write('.'); sys.exit(int(sys.argv[2]))"


@pytest.mark.parametrize(("status", "num_starts"), [(3, 1), (4, 1), (1, 3)])
def test_a_guard_or_a_missing_checkpoint_ends_a_run_that_may_be_restarted(
    tmp_path: Path, status: int, num_starts: int
):
    rank, starts = tmp_path / "rank.py", tmp_path / "starts"
    rank.write_text(RANK)
    done = subprocess.run(
        [sys.executable, "-c", LIGHT + STAND_IN, str(rank), str(starts), str(status)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == status, done.stderr[-3000:]
    assert len(starts.read_text()) == num_starts
