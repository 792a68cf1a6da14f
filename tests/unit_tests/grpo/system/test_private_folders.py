# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Folders of processes that were killed are removed by whoever makes the next one."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from light import LIGHT

from torchtitan.grpo.system.private_folders import make_private_folder

MAKE = LIGHT + (
    "import sys; from torchtitan.grpo.system.private_folders import make_private_folder as make; "
)
OTHER_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
HOLD = MAKE + (
    "import tempfile; tempfile.tempdir = sys.argv[1]; print(make('rollout'), flush=True); sys.stdin.read()"
)
MAKE_ONE = MAKE + "import tempfile; tempfile.tempdir = sys.argv[1]; make('ranks')"


def test_a_folder_of_a_killed_process_is_removed_and_others_stay(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    folder = Path(child.stdout.readline().strip())
    (folder / "configuration").write_text("key")
    other = tmp_path / "torchtitan-grpo-something-else"
    other.mkdir()

    first = make_private_folder("ranks")
    assert folder.is_dir(), "its process lives"
    assert first.stat().st_mode & 0o777 == 0o700
    child.kill()
    child.wait(timeout=30)
    child.stdin.close()
    second = make_private_folder("server")
    assert not folder.exists()
    assert first.is_dir() and second.is_dir() and other.is_dir()
    assert make_private_folder("ranks").is_dir() and first.is_dir()


def test_a_path_is_short_enough_for_sockets(tmp_path: Path, monkeypatch):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = make_private_folder("test")
    try:
        assert len(str(folder)) <= 80
    finally:
        folder.rmdir()


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """A folder for temporary files whose path leaves room for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="p-", dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_a_number_that_another_process_has_now_does_not_keep_a_folder(temporary: Path):
    left = temporary / f"torchtitan-grpo-rollout-{os.getpid()}-17-abc"  # 0.17 s after the boot
    left.mkdir()
    assert make_private_folder("ranks").parent == temporary
    assert not left.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_stays(temporary: Path):
    other = temporary / f"torchtitan-grpo-rollout-{os.getpid()}-17-abc"
    other.mkdir()
    os.chown(other, 12345, 12345)
    assert make_private_folder("ranks").parent == temporary
    assert other.exists()


def needs_namespaces() -> None:
    if subprocess.run([*OTHER_CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("NOT TESTED: processes of another container, because PID namespaces may not be made here")  # fmt: skip


@pytest.mark.parametrize("is_owner_apart", [True, False])
def test_a_folder_of_a_living_process_of_another_container_stays(
    temporary: Path, is_owner_apart: bool
):
    needs_namespaces()
    here, apart = [sys.executable, "-c"], [*OTHER_CONTAINER, sys.executable, "-c"]
    of_owner, of_other = (apart, here) if is_owner_apart else (here, apart)
    with subprocess.Popen(
        [*of_owner, HOLD, str(temporary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        subprocess.run([*of_other, MAKE_ONE, str(temporary)], check=True, timeout=60)
        assert folder.is_dir(), "its process lives, though it is not seen"
        owner.kill()
    # The kernel has ended the lock by the time that the last process of the namespace is gone.
    for _ in range(20):
        subprocess.run([*of_other, MAKE_ONE, str(temporary)], check=True, timeout=60)
        if not folder.exists():
            break
    assert not folder.exists()
