# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""`benchmarks/torn_free.py` with few publishes finds injected mistakes and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit status and the figures of the benchmark."""
    command = [sys.executable, str(REPOSITORY / "benchmarks/torn_free.py"), "--json", *arguments]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr[-6000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == "torn_free" and report["ok"] == (done.returncode == 0)
    return done.returncode, report["figures"]


@pytest.mark.parametrize(
    "publishes", [150, pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(5400)])]
)
def test_no_mixture_is_served_while_servers_are_killed_and_stopped(publishes: int) -> None:
    status, result = run("--publishes", str(publishes))
    assert (result["found"], status) == ([], 0), result
    assert result["publishes"] >= publishes
    assert min(result["kills"], result["stops"], result["superseded"], result["losses"]) > 0
    assert min(result["pushes"], result["parameter_checks"], result["completions_checked"]) > 10


@pytest.mark.parametrize("inject", ["fence", pytest.param("slot", marks=pytest.mark.long)])
def test_a_torn_write_is_found(inject: str) -> None:
    status, result = run("--publishes", "100", "--inject", inject)
    assert status == 1
    assert result["slot_or_bucket_errors"] > 0
    assert result["mixtures"] > 0, "and it is seen from outside, too"
