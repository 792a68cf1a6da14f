# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""`system/cores.py`: the limit of a container. `test_train.py` tests what ranks are given."""

import sys
from pathlib import Path

import pytest

from torchtitan.grpo.system.cores import _quota


@pytest.mark.parametrize(
    ("text", "cores"),
    [("400000 100000\n", 4), ("150000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", None), (None, None)],
)  # fmt: skip
def test_a_container_has_the_cores_of_its_quota(text: str | None, cores: int, tmp_path: Path):
    file = tmp_path / "cpu.max"
    if text is not None:
        file.write_text(text)
    assert _quota(file) == (cores or sys.maxsize)
