# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs `benchmarks/push_exactness.py`: few layouts, or in the long suite all of them."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("choice", "num_layouts"),
    [
        ("--quick", 6),
        pytest.param("--all", 215, marks=[pytest.mark.long, pytest.mark.timeout(5400)]),
    ],
)
def test_servers_hold_what_an_export_holds(repository, choice, num_layouts):
    program = repository / "benchmarks/push_exactness.py"
    done = subprocess.run(
        [sys.executable, str(program), choice, "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert len(report["figures"]) == num_layouts
    for row in report["figures"].values():
        assert row["pushes"] == 4
        if choice == "--quick":
            assert row["sources"] == [0, 1, 2, 3]
            assert sum(row["source_bytes"]) > 0
