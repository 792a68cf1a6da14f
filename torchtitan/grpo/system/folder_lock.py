# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A lock on a folder for the life of a process, on local disks and on those that hosts share.

The holder keeps the kernel's lock (``flock``) on a file with the holder's name, and updates the file's
time every few seconds as a sign of life. A process that finds the file decides whether it is in use:

    the kernel's lock is held by another       in use, even if the holder's process is suspended
    free, holder of this boot of this machine  not in use: the kernel has seen the process end
    free, holder of another machine or boot    in use until the signs of life have stopped, because
                                               not every file system locks across hosts
    the file system has no locks               as in the line above

A process that was silent for a while may find that another one has taken its lock, and must then end. A
process whose folder was removed or moved must end as well.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.network import boot_id

LOCK_FILE = "run.lock"
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""Silence after which a holder counts as ended, where only signs of life can tell."""

# Beyond the difference between the clocks of two hosts.
_OLD_SECONDS = 10 * SILENCE_SECONDS
_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 1.0
_CLOSE_SECONDS = 10.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
# A forked child would keep the kernel's lock after the end of its holder.
_descriptors: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a lock, as the lock's file names it. All fields are empty if that is damaged.

    ``launch`` is the id of the run's launch, which stays the same when a launcher restarts the process.
    ``token`` is random and differs between processes.
    """

    host: str = ""
    pid: int = 0
    boot: str = ""
    since: str = ""
    launch: str | None = None
    token: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "a process that its file does not tell, because the file is damaged,"
        return f"process {self.pid} on {self.host} (since {self.since})"


class FolderInUse(RunError):
    """Another process, which the message names, has the folder."""

    exit_status = 1  # later it may be free


class FolderLock:
    """Lock of one folder: a file in it that exists until the release.

    ``setting`` is what messages to the user call the folder.
    """

    def __init__(self, file: Path, setting: str, launch: str | None = None) -> None:
        self.file, self._setting = file, setting
        self._own = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=boot_id(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            launch=launch,
            token=secrets.token_hex(8),
        )
        self._descriptor = self._folder = -1
        self._last_sign: tuple[Holder | None, int, int] | None = None
        self._last_heard, self._is_heard = 0.0, False

    def acquire(self, patience_seconds: float, tell: Callable[[str], None]) -> None:
        """Takes the lock. Raises FolderInUse if another process still has it after ``patience_seconds``.

        Calls ``tell`` with a message before it waits. If the holder may have ended, waits until a sign of
        life arrives or ``SILENCE_SECONDS`` are over. Raises OSError if the file cannot be used.
        """
        # While it is open, no other folder gets its number.
        self._folder = os.open(self.file.parent, os.O_RDONLY | os.O_DIRECTORY)
        _descriptors.add(self._folder)
        begin, is_told = time.monotonic(), False
        while (found := self._attempt()) is not None:
            holder, is_sure = found
            if not is_told:
                tell(f"{self._setting} is in use by {holder}. Waiting for its end.")
            is_told = True
            if (is_sure or self._is_heard) and time.monotonic() - begin > patience_seconds:
                raise FolderInUse(self._describe(holder, is_sure))
            time.sleep(_POLL_SECONDS)

    def _attempt(self) -> tuple[Holder, bool] | None:
        """Takes the lock, or returns its holder and whether that process is surely alive."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "is no regular file", str(self.file))
            locked = _try_flock(descriptor)
            if not _is_same(self.file, descriptor):  # given back, or taken over, at this moment
                return self._attempt()
            holder = _read_holder(descriptor)
            is_silent = self._is_silent(holder, status)
            if locked is False:
                if not self._is_unreachable(holder):
                    return holder or Holder(), True
                if not is_silent:
                    return holder or Holder(), False
                # Its host cannot be reached, and the kernel's lock stays with the old file.
                self.file.unlink(missing_ok=True)
                return self._attempt()
            if not (holder is None or is_silent or (locked and holder.boot == self._own.boot)):
                return holder, False
            self._write(descriptor)
            if locked is None:  # another process may have decided the same at the same time
                time.sleep(_SETTLE_SECONDS)
                if (winner := _read_holder(descriptor)) != self._own:
                    return winner or Holder(), False
            _descriptors.add(descriptor)
            self._descriptor, descriptor = descriptor, -1
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _is_silent(self, holder: Holder | None, status: os.stat_result) -> bool:
        """Returns whether the holder gives no signs of life: the file is very old, or has long not changed."""
        now, sign = time.monotonic(), (holder, status.st_ino, status.st_mtime_ns)
        if sign != self._last_sign:
            self._is_heard = self._last_sign is not None
            self._last_sign, self._last_heard = sign, now
        is_old = time.time() - status.st_mtime > _OLD_SECONDS
        return is_old or now - self._last_heard >= SILENCE_SECONDS

    def _is_unreachable(self, holder: Holder | None) -> bool:
        """Returns whether a holder of the same launch was on another host or boot, which may be lost.

        A file server may keep the kernel's lock of a lost host."""
        if holder is None or holder.launch is None or holder.boot == self._own.boot:
            return False
        return holder.launch == self._own.launch

    def _write(self, descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(self._own) + b"\n", 0)
        os.fsync(descriptor)

    def _describe(self, holder: Holder, is_sure: bool) -> str:
        silent_seconds = time.monotonic() - self._last_heard
        life = "" if is_sure else (
            f"Its last sign of life came {silent_seconds:.0f} s ago, and without one for "
            f"{SILENCE_SECONDS:.0f} s it counts as ended. "
        )  # fmt: skip
        end = f"end it (kill {holder.pid} on {holder.host})" if holder.pid else "wait for its end"
        return (
            f"{self._setting} can be written by one process at a time, and {holder} holds it, as "
            f"{self.file} says. {life}Either {end}, or choose another folder."
        )

    def beat(self) -> str | None:
        """Gives a sign of life. Returns why this process no longer holds the folder, or None if it does."""
        with contextlib.suppress(OSError):
            if not _is_same(self.file.parent, self._folder):
                return (
                    f"{self._setting} was removed or moved while this process wrote there. It ends, "
                    "since what it would still write would be lost, or would meet another run there."
                )
            found = peek(self.file)
            if found is not None and found.token and found != self._own:
                return (
                    f"{self.file} was taken over by {found}: it was removed, or this process gave no "
                    f"sign of life for {SILENCE_SECONDS:.0f} s. This process ends, since two would spoil "
                    "the folder."
                )
            if found != self._own and _is_same(self.file, self._descriptor):
                self._write(self._descriptor)  # somebody has spoilt the file
            os.utime(self._descriptor)
        return None

    def release(self) -> None:
        """Gives the lock back and removes its file. Further calls do nothing."""
        with contextlib.suppress(OSError):
            held = self._descriptor
            if held >= 0 and _is_same(self.file, held) and _read_holder(held) == self._own:
                self.file.unlink()
        for descriptor in {self._descriptor, self._folder} - {-1}:
            _descriptors.discard(descriptor)
            os.close(descriptor)
        self._descriptor = self._folder = -1


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def peek(file: Path) -> Holder | None:
    with contextlib.suppress(FileNotFoundError), _opened(file) as descriptor:
        return _read_holder(descriptor)
    return None


def living_holder(file: Path) -> Holder | None:
    """Returns who seems to hold a lock, or None. Neither takes the lock nor waits."""
    try:
        with _opened(file) as descriptor:
            holder, locked = _read_holder(descriptor), _try_flock(descriptor, fcntl.LOCK_SH)
            is_old = time.time() - os.fstat(descriptor).st_mtime > _OLD_SECONDS
    except OSError:
        return None
    if locked is False:
        return holder or Holder()
    if holder is None or is_old or (locked and holder.boot == boot_id()):
        return None
    return holder


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_holder(descriptor: int) -> Holder | None:
    content = os.pread(descriptor, 65536, 0)
    if not content:
        return None
    try:
        return msgspec.json.decode(content, type=Holder)
    except (msgspec.DecodeError, ValueError):
        return Holder()


def _try_flock(descriptor: int, mode: int = fcntl.LOCK_EX) -> bool | None:
    """Tries to take the kernel's lock. Returns whether that worked, or None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


class HeldFolders:
    """Locks of this process, and the thread that gives their signs of life.

    If a lock is lost, that thread calls ``on_lost`` with a message.
    """

    def __init__(
        self,
        locks: Sequence[FolderLock],
        patience_seconds: float,
        tell: Callable[[str], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._locks, self._on_lost = locks, on_lost
        try:
            for lock in locks:
                lock.acquire(patience_seconds, tell)
        except BaseException:
            self._release()
            raise
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="folder-lock", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            for lock in self._locks:
                if (lost := lock.beat()) is not None:
                    self._on_lost(lost)
                    return

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()

    def close(self) -> None:
        """Ends the thread and releases all locks. Further calls do nothing."""
        self._end.set()
        self._thread.join(_CLOSE_SECONDS)
        self._release()
