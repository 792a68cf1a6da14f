# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests of how much host memory a process may still take."""

from pathlib import Path

import psutil

from torchtitan.grpo.system.host_memory import available_bytes


def test_it_is_that_of_the_host_without_a_limit(tmp_path: Path):
    free = available_bytes(tmp_path)
    assert abs(free - psutil.virtual_memory().available) < 0.1 * psutil.virtual_memory().total
    for name, text in (("max", "max"), ("current", "5"), ("stat", "inactive_file 2")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert abs(available_bytes(tmp_path) - free) < 0.1 * psutil.virtual_memory().total


def test_the_limit_of_a_container_counts_without_what_is_cached(tmp_path: Path):
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 1\ninactive_file 100")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert available_bytes(tmp_path) == 1000 - 700 + 100
    (tmp_path / "memory.current").write_text("5000\n")
    assert available_bytes(tmp_path) == 0
