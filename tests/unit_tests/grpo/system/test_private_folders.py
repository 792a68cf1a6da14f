# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Folders and shared memory of processes that were killed are removed, and those of others are not."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from light import LIGHT

from torchtitan.grpo.system import private_folders
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.private_folders import make_private_folder, note_held, remove_noted

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="/dev/shm and flock on folders are Linux's"
)

MAKE = LIGHT + (
    "import sys; from torchtitan.grpo.system.private_folders import make_private_folder as make; "
)
OTHER_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
HOLD = MAKE + (
    "import tempfile; tempfile.tempdir = sys.argv[1]; print(make('rollout'), flush=True); sys.stdin.read()"
)
MAKE_ONE = MAKE + "import tempfile; tempfile.tempdir = sys.argv[1]; make('ranks')"


PIPES: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def test_a_folder_of_a_killed_process_is_removed_and_others_stay(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **PIPES)
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
    (deep := tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = make_private_folder("test")
    folder.rmdir()
    assert len(str(folder)) <= 80, "it has room for the path of a socket"


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """A folder for temporary files whose path leaves room for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="p-", dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_number_that_another_process_has_keeps_only_folders_of_other_users(temporary, is_own):
    left = temporary / f"torchtitan-grpo-rollout-{os.getpid()}-abc"
    left.mkdir()
    if not is_own:
        if os.getuid() != 0:
            pytest.skip("NOT TESTED: a folder of another user, because only root can give one away")
        os.chown(left, 12345, 12345)
    assert make_private_folder("ranks").parent == temporary
    assert left.exists() != is_own


@pytest.mark.parametrize("is_owner_apart", [True, False])
def test_a_folder_of_a_living_process_of_another_container_stays(temporary, is_owner_apart):
    if subprocess.run([*OTHER_CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("NOT TESTED: another container; PID namespaces may not be made here")
    here, apart = [sys.executable, "-c"], [*OTHER_CONTAINER, sys.executable, "-c"]
    of_owner, of_other = (apart, here) if is_owner_apart else (here, apart)
    with subprocess.Popen([*of_owner, HOLD, str(temporary)], **PIPES) as owner:
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


# Holds a file in shared memory that nothing removes, as SGLang does.
HOLDER = textwrap.dedent("""
    import mmap, sys, tempfile, time
    file = tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="grpo-test-", delete=False)
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
    print(file.name, flush=True)
    time.sleep(600)
""")
# Shares memory as vLLM does, with a process of Python that tracks it.
TRACKED = textwrap.dedent("""
    import time
    from multiprocessing.shared_memory import SharedMemory
    memory = SharedMemory(create=True, size=4096)
    print("/dev/shm/" + memory.name, flush=True)
    time.sleep(600)
""")


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    children: list[subprocess.Popen] = []

    def start_program(program: str) -> tuple[subprocess.Popen, Path]:
        log = tmp_path / f"{len(children)}.log"
        children.append(start_child([sys.executable, "-c", program], log_file=log))
        while not (text := log.read_text()).endswith("\n"):
            assert children[-1].poll() is None, text
        return children[-1], Path(text.strip())

    yield start_program
    stop_children(children, grace_seconds=0.0)


def test_noted_files_are_removed_once_nobody_holds_them(tmp_path: Path, start):
    killed, left = start(HOLDER)
    other, kept = start(HOLDER)
    for process in (killed, other):
        note_held(process.pid, tmp_path)
    remove_noted(tmp_path)
    assert left.exists() and kept.exists(), "both are held"
    for process, are_left in ((killed, (False, True)), (other, (False, False))):
        process.kill()
        process.wait(30)
        remove_noted(tmp_path)
        assert (left.exists(), kept.exists()) == are_left


def test_tracked_memory_of_a_killed_program_is_removed_with_its_session(start):
    child, memory = start(TRACKED)
    assert memory.exists()
    stop_children([child], grace_seconds=0.0)
    assert not memory.exists(), "its tracker had the time to remove it"


@pytest.mark.parametrize("sees_all", [True, False])
def test_a_semaphore_that_nobody_holds_belongs_to_the_session_in_whose_time_it_was_made(
    tmp_path: Path, start, monkeypatch, sees_all: bool
):
    here = os.stat("/proc/self/ns/pid").st_ino
    # In a container, a process elsewhere may hold it.
    monkeypatch.setattr(private_folders, "_ALL_PROCESSES", here if sees_all else 0)
    older, younger = (Path(f"/dev/shm/sem.mp-{name}-{os.getpid()}") for name in ("old", "young"))
    older.touch()
    time.sleep(0.1)
    try:
        child, _ = start(HOLDER)
        younger.touch()
        note_held(child.pid, tmp_path)
        child.kill()
        child.wait(30)
        remove_noted(tmp_path)
        assert older.exists() and younger.exists() != sees_all
    finally:
        older.unlink()
        younger.unlink(missing_ok=True)


def test_a_semaphore_of_a_living_program_is_kept_until_its_children_open_it(tmp_path: Path, start):
    other, _ = start(HOLDER)
    lock = multiprocessing.get_context("spawn").Lock()
    name: str = getattr(lock, "_semlock").name  # noqa: B009  (typeshed does not know it)
    semaphore = Path("/dev/shm") / f"sem.{name.lstrip('/')}"
    note_held(other.pid, tmp_path)
    other.kill()
    other.wait()
    remove_noted(tmp_path)
    assert semaphore.exists()
