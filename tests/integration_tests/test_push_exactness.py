# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The benchmark of exactness, on some layouts."""

import json
import subprocess
import sys


def test_servers_hold_what_an_export_holds_under_several_layouts(repository):
    program = repository / "benchmarks/push_exactness.py"
    done = subprocess.run(
        [sys.executable, str(program), "--quick", "--json"],
        capture_output=True, text=True, timeout=840,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert len(report["figures"]) == 5
    for row in report["figures"].values():
        assert row["pushes"] == 4
        assert row["sources"] == ([0, 2] if "PP x2" in row["layout"] else [0])
