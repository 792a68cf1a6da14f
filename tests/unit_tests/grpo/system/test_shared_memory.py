# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Shared memory that a killed program left is removed, and that of others is not."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from light import LIGHT

from torchtitan.grpo.system import shared_memory
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.shared_memory import note_held, remove_noted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")

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
    killed.kill()
    killed.wait(30)
    assert left.exists()
    remove_noted(tmp_path)
    assert not left.exists()
    assert kept.exists()
    other.kill()
    other.wait(30)
    remove_noted(tmp_path)
    assert not kept.exists()


def test_tracked_memory_of_a_killed_program_is_removed_with_its_session(start):
    child, memory = start(TRACKED)
    assert memory.exists()
    stop_children([child], grace_seconds=0.0)
    assert not memory.exists(), "its tracker had the time to remove it"


def test_a_semaphore_that_nobody_holds_belongs_to_the_session_in_whose_time_it_was_made(
    tmp_path: Path, start
):
    if not shared_memory.sees_all_processes():
        pytest.skip("NOT TESTED: semaphores that nobody holds, which are left where this is a container")  # fmt: skip
    older, younger = (
        Path(f"/dev/shm/sem.mp-{name}-{os.getpid()}") for name in ("older", "younger")
    )
    older.touch()
    time.sleep(0.1)
    try:
        child, _ = start(HOLDER)
        younger.touch()
        note_held(child.pid, tmp_path)
        child.kill()
        child.wait(30)
        remove_noted(tmp_path)
        assert older.exists() and not younger.exists()
    finally:
        older.unlink()
        younger.unlink(missing_ok=True)


# In another container: starts a session, waits for a word, then cleans up as after that session.
CLEANER = LIGHT + textwrap.dedent("""
    import subprocess, sys
    from pathlib import Path
    from torchtitan.grpo.system.shared_memory import note_held, remove_noted
    folder = Path(sys.argv[1])
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("started", flush=True)
    sys.stdin.readline()
    note_held(child.pid, folder)
    child.kill()
    child.wait()
    remove_noted(folder)
""")


def test_a_semaphore_of_a_living_process_of_another_container_stays(tmp_path: Path):
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("NOT TESTED: processes of another container, because PID namespaces may not be made here")  # fmt: skip
    with subprocess.Popen(
        [*apart, sys.executable, "-c", CLEANER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as cleaner:  # fmt: skip
        assert cleaner.stdout is not None
        assert cleaner.stdout.readline() == "started\n"
        semaphore = multiprocessing.get_context("spawn").Semaphore()
        file = Path("/dev/shm", f"sem.{semaphore._semlock.name.removeprefix('/')}")  # pyright: ignore
        assert file.exists()
        cleaner.communicate("go\n", timeout=60)
    assert cleaner.returncode == 0
    assert file.exists(), "this process holds it, though it is not seen there"


def test_a_semaphore_of_a_living_program_is_kept_until_its_children_open_it(tmp_path: Path, start):
    """A server that starts beside one that ends: its worker processes open it later, by name."""
    other, _ = start(HOLDER)
    lock = multiprocessing.get_context("spawn").Lock()
    name: str = getattr(lock, "_semlock").name  # noqa: B009  (typeshed does not know it)
    semaphore = Path("/dev/shm") / f"sem.{name.lstrip('/')}"
    note_held(other.pid, tmp_path)
    other.kill()
    other.wait()
    remove_noted(tmp_path)
    assert semaphore.exists()
