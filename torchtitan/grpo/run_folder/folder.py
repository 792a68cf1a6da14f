# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The folder of a run, which no other run may change between its start and its end."""

import errno
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.run_folder.contents import describe_run
from torchtitan.grpo.run_folder.launch import (
    is_first_attempt,
    is_gone_on_with,
    is_restart,
    launch_id,
    note_launch,
)
from torchtitan.grpo.run_folder.replacing import earlier_runs, move_aside, restore_interrupted
from torchtitan.grpo.system.errors import FOLDER_LOST, RunError
from torchtitan.grpo.system.folder_lock import LOCK_FILE, FolderLock, HeldFolders, living_holder
from torchtitan.grpo.system.rank_status import claims_report

_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)


class FolderError(RunError):
    """``job.dump_folder`` cannot be used."""


class RunFolder:
    """``job.dump_folder`` and all else that a run writes, locked by rank 0 until :meth:`close`.

    ``is_restart`` says that earlier ranks of this launch began the run. Raises FolderInUse, FolderError.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._held = hold(config)
        try:
            restored = restore_interrupted(config.job.dump_folder)
            self.is_restart = is_restart(config.job.dump_folder)
        except OSError as error:
            self._held.close()
            raise FolderError(
                f"The run in job.dump_folder = {config.job.dump_folder} must be complete and "
                f"readable before a start: {error}. Correct this, and start again."
            ) from error
        for path in restored:
            _tell(f"A start was ended while it moved a run to {path}. The run is back in place.")
        for line in describe_earlier(config):
            _tell(line)

    def begin(self) -> None:
        """Assigns the folder to this run. With ``job.overwrite``, moves an earlier run aside.

        Raises FolderInUse while the earlier run is being evaluated, or FolderError.
        """
        config = self._config
        if self.is_restart:
            return
        earlier = describe_run(config)
        try:
            if config.job.overwrite:
                then = "stays there, because it may be of an earlier attempt of this launch"
                if is_first := is_first_attempt(config.job.dump_folder):
                    then = "is removed once this run has completed a step"
                aside = move_aside(config, keep=not is_first)
                if aside is not None and earlier:
                    _tell(
                        f"The earlier run, with {earlier}, was moved to {aside} (job.overwrite). It {then}."
                    )
            note_launch(config.job.dump_folder)
        except OSError as error:
            raise FolderError(
                f"The run in job.dump_folder = {config.job.dump_folder} must make room for this one, "
                f"but: {error}. Correct that, or choose another folder."
            ) from error

    def close(self, *, failed: bool) -> None:
        """Lets other runs use the folder. If this run failed before it began, says where an earlier run is."""
        if failed and not describe_run(self._config):  # this run has not begun
            for line in describe_earlier(self._config):
                _tell(line)
        self._held.close()


def hold(config: JobConfig, folder: Path | None = None) -> HeldFolders:
    """Makes and locks ``folder``, or all that a run writes to. Raises FolderInUse and FolderError."""
    launch = launch_id()
    # A run that was asked to stop ends within its bound. Other ranks wait meanwhile.
    patience = min(config.grpo.stop_timeout_seconds + 2, config.comm.init_timeout_seconds / 2)
    try:
        _check_name(config.job.dump_folder)
        (folder or Path(config.job.dump_folder)).mkdir(parents=True, exist_ok=True)
        named = _locks(config) if folder is None else {folder / LOCK_FILE: f"The folder {folder}"}
        for file, setting in named.items():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise FolderError(f"{setting} cannot be made: {error}. Choose another.") from error
        locks = [FolderLock(file, setting, launch) for file, setting in named.items()]
        return HeldFolders(locks, patience, _tell, _leave)
    except (OSError, ValueError) as error:
        raise FolderError(_not_usable(config.job.dump_folder, error)) from error


def _locks(config: JobConfig) -> dict[Path, str]:
    folder = Path(config.job.dump_folder)
    found = {folder / LOCK_FILE: f"job.dump_folder = {folder}"}
    checkpoints = folder / config.checkpoint.folder
    if config.checkpoint.enable and not _is_within(checkpoints, folder):
        found[checkpoints / LOCK_FILE] = f"checkpoint.folder = {config.checkpoint.folder}"
    if config.rollout.record and not _is_within(record := Path(config.rollout.record), folder):
        found[record.with_name(f"{record.name}.lock")] = f"rollout.record = {record}"
    versions = config.weight_sync.disk_path if config.weight_sync.transport == "disk" else None
    if versions is not None and Path(versions).resolve() != folder.resolve():
        found[Path(versions) / LOCK_FILE] = f"weight_sync.disk_path = {versions}"
    return found


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def describe_earlier(config: JobConfig) -> Iterator[str]:
    for path in earlier_runs(config.job.dump_folder, "replacing"):
        yield (
            f"A start was ended while it moved a run to {path}. The next start moves that back first."
        )
    for path in earlier_runs(config.job.dump_folder):
        what, end = describe_run(config, path), ""
        if what is None:
            continue
        if not (path.name.startswith("kept") or is_gone_on_with(path)):
            end = ", or start with --job.overwrite, which removes it once the new run has completed a step"
        yield (
            f"An earlier run that was replaced (job.overwrite), with {what}, is whole in {path}. To "
            f"go on with it, use --job.dump_folder {path}; to be rid of it, remove it{end}."
        )


def describe_folder(config: JobConfig) -> Iterator[str]:
    """Yields lines about what a start would find in its folder, without locking or changing it."""
    yield from describe_earlier(config)
    for file, setting in _locks(config).items():
        if (holder := living_holder(file)) is not None:
            yield f"warning: {setting} is in use by {holder}. A start would wait for its end."
    error = _problem(config.job.dump_folder)
    if _is_forbidden(error):
        yield f"warning: {_not_usable(config.job.dump_folder, error)}"


def check_folder(config: JobConfig) -> None:
    """Raises FolderError if no user could write to the folder. Takes no lock and leaves nothing there."""
    error = _problem(config.job.dump_folder)
    if error is None or (_is_forbidden(error) and _is_visible(Path(config.job.dump_folder))):
        return  # another user, or another host, may be permitted
    raise FolderError(_not_usable(config.job.dump_folder, error))


def _is_forbidden(error: Exception | None) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in _NOT_PERMITTED


def _is_visible(folder: Path) -> bool:
    try:
        if folder.is_dir():
            os.scandir(folder).close()
    except OSError:
        return False
    return True


def _check_name(name: str) -> None:
    """Refuses valid names that are not the folder that the user means, such as ``~/outputs`` or a URL."""
    if not name.strip():
        raise ValueError("it is empty")
    if name.startswith("~"):
        raise ValueError("only a shell replaces ~ by a home folder")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name):
        raise ValueError("it is a URL")


def _problem(name: str) -> Exception | None:
    folder = Path(name)
    try:
        _check_name(name)
        if folder.is_dir():
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            return None
        parent = _nearest(folder)
        longest = os.pathconf(parent, "PC_NAME_MAX")
        if any(len(os.fsencode(part)) > longest for part in folder.parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(folder))
        # Some folders, such as those of /proc, can be entered and hold no files.
        os.rmdir(tempfile.mkdtemp(prefix=".torchtitan-grpo-", dir=parent))
    except (OSError, ValueError) as error:
        return error
    return None


def _nearest(folder: Path) -> Path:
    """Returns what exists of a path: the path itself, or the innermost folder around it."""
    while True:
        try:
            os.lstat(folder)
            return folder
        except FileNotFoundError:
            folder = folder.parent


def _not_usable(dump_folder: str, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    name = getattr(error, "filename", None)
    where = f" ({name})" if name and str(name) != dump_folder else ""
    given = dump_folder or '""'
    return (
        f"job.dump_folder must be a folder that this user can make and write, got "
        f"{given}: {reason}{where}. Choose another folder."
    )


def _tell(text: str) -> None:
    print(text, flush=True)


def _leave(message: str) -> None:
    """Ends this process, which has lost its folder: further writes would be lost, or spoil another run."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    claims_report(0)  # the other ranks of this host need not tell that this one has died
    os._exit(FOLDER_LOST)
