# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The checks themselves, as far as a CPU can run them, in processes of their own."""

import pytest

from torchtitan.grpo.check_gpu.owner import run_check
from torchtitan.grpo.check_gpu.row import Row
from torchtitan.grpo.check_gpu.table import CHECKS


def rows_of(name: str) -> list[Row]:
    (check,) = (check for check in CHECKS if check.name == name)
    rows = run_check(check, "cpu")
    assert all(row.status != "failed" for row in rows), [row.reason for row in rows]
    return rows


def test_copies_files_and_deltas_run_beside_steps():
    rows = rows_of("isolation")
    assert [row.case for row in rows] == [
        "copies into pinned slots", "writing a version to disk", "encoding deltas",
    ]  # fmt: skip
    assert all(row.figures["steps"] >= 50 and row.figures["p99_ms"] > 0 for row in rows)


def test_snapshots_are_compared_byte_for_byte():
    (row,) = rows_of("allocator")
    assert row.status == "passed"
    assert row.figures["differing_bytes"] == 0 and row.figures["snapshot_bytes"] > 0


def test_fence_and_publish_are_measured():
    (row,) = rows_of("boundary")
    assert row.figures["parameters"] > 50_000 and row.figures["publish_ms"] > 0


def test_logprobs_are_compared_with_float64():
    (row,) = rows_of("output-layer")
    assert row.status == "passed"
    assert 0 < row.figures["logprob_error"] < 1e-4
    assert row.figures["hidden_gradient_error"] < 1e-4


@pytest.mark.long  # lost servers in whole runs are the subject of other tests
def test_a_real_run_survives_its_servers():
    stopped, killed = rows_of("end-to-end")
    assert stopped.figures["steps"] > 0
    assert killed.status == "passed" and killed.figures["exit_status"] == 143
