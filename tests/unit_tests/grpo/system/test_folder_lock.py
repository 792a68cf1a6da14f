# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The lock of a folder: two processes never hold it, and no dead one keeps it."""

import contextlib
import ctypes
import os
import queue
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from torchtitan.grpo.system import folder_lock
from torchtitan.grpo.system.folder_lock import (
    FolderInUse,
    FolderLock,
    HeldFolders,
    Holder,
    living_holder,
    peek,
)
from torchtitan.grpo.system.network import boot_id

NEW_UTS, NEW_PID = 0x04000000, 0x20000000
PATIENCE = 60.0


class Owner:
    """A process that holds a lock until it is killed."""

    def __init__(self, file: Path, unshare: int = 0, host: str | None = None, forks: bool = False):
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._hold(file, unshare, host, forks, write)
        os.close(write)
        answer = os.read(read, 100)
        os.close(read)
        if answer.startswith(b"unshare"):
            pytest.skip("namespaces may not be made here")
        assert answer == b"held", answer

    def _hold(self, file: Path, unshare: int, host: str | None, forks: bool, write: int) -> None:
        try:
            if unshare and ctypes.CDLL(None).unshare(unshare):
                os.write(write, b"unshare failed")
                os._exit(0)
            if unshare & NEW_PID and (inner := os.fork()):
                # As a container's runtime: the inner process ends with the outer one.
                os.waitpid(inner, 0)
                os._exit(0)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            if host is not None:
                socket.sethostname(host)
            FolderLock(file, "x", "first launch").acquire(0.0, lambda _: None)
            if forks and os.fork() == 0:
                os.close(write)
                time.sleep(PATIENCE)
            os.write(write, b"held")
            time.sleep(PATIENCE)
        finally:
            os._exit(1)

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kills it, and leaves its status for later, as an agent may."""
        self.send(signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.lock"


@pytest.fixture
def own(file: Path) -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def make(**arguments) -> Owner:
        owners.append(Owner(file, **arguments))
        return owners[-1]

    yield make
    for owner in owners:
        owner.send(signal.SIGKILL)
        os.waitpid(owner.pid, 0)


@pytest.fixture
def no_locks(monkeypatch) -> None:
    monkeypatch.setattr(folder_lock, "_try_flock", lambda *_: None)
    monkeypatch.setattr(folder_lock, "_SETTLE_SECONDS", 0.01)


def take(file: Path, patience: float = 0.2, launch: str = "second launch") -> FolderLock:
    lock = FolderLock(file, "job.dump_folder = outputs/run", launch)
    lock.acquire(patience, lambda _: None)
    assert peek(file) is not None and living_holder(file) is not None
    return lock


def told_by(file: Path) -> Holder:
    holder = peek(file)
    assert holder is not None
    return holder


def left(file: Path, age: float = 0.0, **changes) -> None:
    holder = Holder(
        host=socket.gethostname(), pid=os.getpid(), boot=boot_id(),
        since="2026-01-01T00:00:00+00:00", launch="first launch", token="x",
    )  # fmt: skip
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(holder, **changes)))
    os.utime(file, (time.time() - age, time.time() - age))


CHANGES: dict[str, Callable[[Owner, Path], object]] = {
    "none": lambda owner, file: None,
    "stopped": lambda owner, file: owner.send(signal.SIGSTOP),
    "aged": lambda owner, file: os.utime(file, (0, 0)),
    "damaged": lambda owner, file: file.write_text("{"),
    "emptied": lambda owner, file: os.truncate(file, 0),
}


@pytest.mark.parametrize(
    ("arguments", "change", "told"),
    [
        ({}, "none", f"on {socket.gethostname()} (since 20"),
        ({"unshare": NEW_UTS, "host": "node-b"}, "none", "on node-b (since 20"),
        ({"unshare": NEW_PID | NEW_UTS, "host": "node-b"}, "stopped", "on node-b"),
        ({}, "aged", "kill "),
        ({}, "damaged", "the file is damaged"),
        ({}, "emptied", "wait for its end"),
        ({"forks": True}, "none", "run.lock"),
    ],
)
def test_a_living_holder_keeps_the_lock_and_is_told(file, own, arguments, change, told):
    owner = own(**arguments)
    CHANGES[change](owner, file)
    begin = time.monotonic()
    message = r"^job\.dump_folder = outputs/run can be written by one"
    with pytest.raises(FolderInUse, match=message) as e:
        take(file)
    assert told in str(e.value)
    assert living_holder(file) is not None
    assert time.monotonic() - begin < PATIENCE / 2


def killed_when_stopped(own, file: Path) -> None:
    owner = own()
    owner.send(signal.SIGSTOP)
    owner.kill()


def damaged_long_ago(own, file: Path) -> None:
    file.write_bytes(b"\0" * 64)
    os.utime(file, (0, 0))


LEAVE: dict[str, Callable] = {
    "killed, survived by a child": lambda own, file: own(forks=True).kill(),
    "killed when stopped": killed_when_stopped,
    "of another host": lambda own, file: left(file, boot="another", host="node-b", age=400),
    "damaged long ago": damaged_long_ago,
    "emptied": lambda own, file: file.touch(),
    "none": lambda own, file: None,
}


@pytest.mark.parametrize("leave", LEAVE)
def test_a_dead_holder_does_not(file, own, leave):
    LEAVE[leave](own, file)
    lock = take(file, patience=5)
    assert told_by(file).pid == os.getpid()
    with pytest.raises(FolderInUse):
        take(file)
    lock.release()
    assert not file.exists()
    lock.release()


@pytest.fixture
def beating(file: Path) -> Iterator[Callable[[], None]]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.02):
            os.utime(file)

    thread = threading.Thread(target=beat, name="beats")
    yield thread.start
    ended.set()
    if thread.ident is not None:
        thread.join()


@pytest.mark.parametrize("beats", [True, False])
@pytest.mark.parametrize(
    ("changes", "has_locks"),
    [({"boot": "another", "host": "node-b"}, True), ({"host": "node-b"}, False), (None, True)],
    ids=["host", "no locks", "damaged"],
)
def test_a_holder_that_only_its_signs_of_life_tell_of_is_waited_for(
    file, request, monkeypatch, beating, beats, has_locks, changes
):
    monkeypatch.setattr(folder_lock, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(folder_lock, "_OLD_SECONDS", 60.0)
    if not has_locks:
        request.getfixturevalue("no_locks")
    left(file, **(changes or {}))
    if changes is None:
        file.write_text("{")
    if not beats:  # it is over after the silence
        begin = time.monotonic()
        lock = FolderLock(file, "x")
        lock.acquire(0.0, lambda _: None)
        assert time.monotonic() - begin >= 0.5
        lock.release()
        return
    beating()
    with pytest.raises(FolderInUse, match="last sign of life came 0 s ago"):
        take(file)


def test_one_of_several_that_start_at_once_gets_the_lock(file):
    def attempt(_: int) -> FolderLock | None:
        lock = FolderLock(file, "x")
        begin.wait(PATIENCE)
        with contextlib.suppress(FolderInUse):
            lock.acquire(0.0, lambda _: None)
            return lock
        return None

    begin = threading.Barrier(4)
    for _ in range(3):
        left(file, boot="another", age=400)
        with ThreadPoolExecutor(4) as threads:
            locks = [lock for lock in threads.map(attempt, range(4)) if lock is not None]
        assert len(locks) == 1
        locks[0].release()


@pytest.mark.parametrize(
    ("launch", "boot", "taken"),
    [
        ("first launch", "another", True),
        ("first launch", None, False),  # it lives: its kernel says so
        ("second launch", "another", False),
    ],
)
def test_a_restart_takes_over_from_a_host_that_cannot_be_reached(
    file, own, monkeypatch, launch, boot, taken
):
    """A file server may keep a lock for a host that is gone."""
    monkeypatch.setattr(folder_lock, "SILENCE_SECONDS", 0.2)
    own()
    held = told_by(file)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(held, boot=boot or held.boot)))
    if taken:
        take(file, launch=launch).release()
        return
    with pytest.raises(FolderInUse):
        take(file, patience=0.5, launch=launch)


def test_a_holder_whose_lock_was_taken_over_hears_of_it(file, monkeypatch):
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.02)
    told: queue.Queue[str] = queue.Queue()
    held = HeldFolders([FolderLock(file, "x")], 0.0, lambda _: None, told.put)
    before = file.stat().st_mtime_ns
    deadline = time.monotonic() + PATIENCE
    while file.stat().st_mtime_ns == before:
        assert time.monotonic() < deadline, "it gives signs of life"
        time.sleep(0.01)
    file.unlink()
    left(file, host="node-b", pid=7, token="another")
    said = told.get(timeout=PATIENCE)
    assert "was taken over by process 7 on node-b (since 20" in said
    assert "it was removed, or this process gave no sign of life for 30 s." in said
    held.close()
    held.close()
    assert told_by(file).token == "another", "the other's file stays"


def replaced(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


LOSE: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "removed with a parent": lambda folder: shutil.rmtree(folder.parent),
    "moved": lambda folder: folder.rename(folder.with_name("old")),
    "moved with a parent": lambda folder: folder.parent.rename(folder.parent.with_name("old")),
    "made anew": replaced,
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.touch()),
    "moved, a link to it": lambda f: (f.rename(f.with_name("old")), f.symlink_to("old")),
}


@pytest.mark.parametrize("lose", LOSE)
def test_a_holder_whose_folder_is_gone_hears_of_it(tmp_path, monkeypatch, lose):
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.02)
    (folder := tmp_path / "outputs" / "run").mkdir(parents=True)
    told: queue.Queue[str] = queue.Queue()
    lock = FolderLock(folder / "run.lock", "job.dump_folder = outputs/run")
    held = HeldFolders([lock], 0.0, lambda _: None, told.put)
    LOSE[lose](folder)
    if "link" in lose:  # it is the same folder
        assert lock.beat() is None
        assert told.empty()
    else:
        assert told.get(timeout=PATIENCE).startswith("job.dump_folder = outputs/run was removed or")
    held.close()
    assert not list(tmp_path.glob("**/run.lock")) or "moved" in lose


@pytest.mark.parametrize("in_the_way", [lambda f: f.mkdir(), os.mkfifo, lambda f: f.symlink_to(f)])
def test_what_is_no_file_is_refused_at_once(file, in_the_way):
    in_the_way(file)
    with pytest.raises(OSError):
        take(file)
