# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What one rank of a host does for all of them."""

import os
import tempfile
from pathlib import Path

import pytest

from torchtitan.grpo.system.once_per_host import once_per_host


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return tmp_path


def _call(monkeypatch, rank: int, answer: int):
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    return once_per_host("the test", lambda: {"answer": answer}, timeout_seconds=30)


def test_the_other_ranks_get_the_answer_of_the_first(temporary: Path, monkeypatch):
    assert _call(monkeypatch, 0, 1) == {"answer": 1}
    assert _call(monkeypatch, 1, 2) == {"answer": 1}
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o077 == 0, "nobody else may put an answer there"


@pytest.mark.skipif(os.getuid() != 0, reason="needs to make a folder of another user")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_of_another_user_is_refused(temporary: Path, monkeypatch, rank: int):
    folder = temporary / f"torchtitan-grpo-{os.getuid()}"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    with pytest.raises(RuntimeError, match=r"uid 12345\. Remove it, or set TMPDIR"):
        _call(monkeypatch, rank, 1)
