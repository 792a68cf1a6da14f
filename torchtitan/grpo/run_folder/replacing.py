# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Replaces the run in a folder (``job.overwrite``) so that a kill at any moment loses nothing.

    replacing-TIME   what runs have written is moved into it, item by item; the next start moves it back
    replaced-TIME    holds a whole earlier run, until the new run has completed a step
    kept-TIME        the same, but it is kept, since it may be from an earlier attempt of this launch
    removing-TIME    is being removed; if that is interrupted, the next run continues it

A folder gets its next name in one rename. The new run writes nothing before the folder has its second
name. Then the run notes its launch (`launch.py`), so that its restarts replace nothing. Parts on other
file systems, such as linked checkpoints, move to a folder ``replaced-TIME`` beside them. The moved run's
``elsewhere.json`` names that folder, whose own ``elsewhere.json`` names the run folder and TIME. Only
folders that name the run folder are moved or removed, so a copied run leaves the original's parts alone.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.run_folder.contents import written
from torchtitan.grpo.run_folder.launch import is_gone_on_with
from torchtitan.grpo.system.files import read_regular, sync_folder, write_whole
from torchtitan.grpo.system.folder_lock import LOCK_FILE, FolderInUse, living_holder
from torchtitan.grpo.system.logs import logger

_ASIDE = re.compile(r"(replacing|replaced|kept|removing)-\d{8}-\d{6}-\d+")
_ELSEWHERE = "elsewhere.json"
_CLOSE_SECONDS = 2.0


def earlier_runs(dump_folder: str, *states: str) -> list[Path]:
    folder = Path(dump_folder)
    wanted = states or ("replaced", "kept")
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(p for p in found if (m := _ASIDE.fullmatch(p.name)) and m[1] in wanted)


def move_aside(config: JobConfig, *, keep: bool) -> Path | None:
    """Moves what runs have written into a new subfolder, and returns it, or None if there was nothing.

    With ``keep``, the folder is never removed. Raises FolderInUse while an evaluation of the run goes on.
    If an item cannot be moved, everything is moved back and OSError is raised.
    """
    folder = Path(config.job.dump_folder)
    items = list(_items(config, folder))
    if not items:
        return None
    for lock in folder.glob(f"evaluate/*/{LOCK_FILE}"):
        if (holder := living_holder(lock)) is not None:
            raise FolderInUse(
                f"The run in job.dump_folder = {folder} must not be in use when it is replaced "
                f"(job.overwrite), but {holder} evaluates it. Wait until that ends."
            )
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    moving = folder / f"replacing-{name}"
    aside = folder / f"{'kept' if keep else 'replaced'}-{name}"
    moving.mkdir()
    try:
        others = {root: root / f"replaced-{name}" for _, root, _ in items if root is not None}
        if others:
            places = {str(root): str(place) for root, place in others.items()}
            write_whole(moving / _ELSEWHERE, msgspec.json.encode(places))
            for place in others.values():
                write_whole(place / _ELSEWHERE, _mark(moving))
        for path, root, relative in items:
            if os.path.lexists(path):  # not yet moved under another name
                _move(path, (moving if root is None else others[root]) / relative)
                _remove_empty(path.parent, folder)
        moving.rename(aside)
    except OSError:
        restore_interrupted(str(folder))
        raise
    sync_folder(folder)
    return aside


def _items(config: JobConfig, folder: Path) -> Iterator[tuple[Path, Path | None, Path]]:
    """Yields each path to move, its root, and the path relative to this root.

    The root is the path's own folder if that lies elsewhere, or None for the dump folder."""
    whole = folder.resolve()
    for path in dict.fromkeys(written(config)):
        parent = path.parent.resolve()
        if not parent.is_relative_to(whole) or parent.stat().st_dev != whole.stat().st_dev:
            yield path, parent, Path(path.name)
            continue
        relative = parent.relative_to(whole) / path.name
        if not any(map(_ASIDE.fullmatch, relative.parts)):  # else it is of an earlier run
            yield path, None, relative


def _move(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):
        raise FileExistsError(f"{path} cannot be moved to {target}, which exists already")
    path.rename(target)


def _remove_empty(folder: Path, root: Path) -> None:
    with suppress(OSError):
        while folder != root and folder.is_relative_to(root):
            folder.rmdir()
            folder = folder.parent


def restore_interrupted(dump_folder: str) -> list[Path]:
    """Moves back what killed starts had moved. Returns the folders that held it; raises OSError on failure."""
    found = earlier_runs(dump_folder, "replacing")
    for moving in found:
        for aside, root in [*_elsewhere(moving), (moving, Path(dump_folder))]:
            if aside.is_dir():
                _restore(aside, root)
    return found


def _restore(aside: Path, root: Path) -> None:
    for path in list(aside.iterdir()):
        if path.name == _ELSEWHERE or path.name == f"{_ELSEWHERE}.partial":
            continue
        target = root / path.name
        if path.is_dir() and not path.is_symlink() and target.is_dir():
            _restore(path, target)
        else:
            _move(path, target)
    for name in (f"{_ELSEWHERE}.partial", _ELSEWHERE):
        (aside / name).unlink(missing_ok=True)
    aside.rmdir()


def _elsewhere(aside: Path) -> Iterator[tuple[Path, Path]]:
    """Yields, for each part of an earlier run on another file system, its new path and its original one."""
    file = aside / _ELSEWHERE
    try:
        places = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        logger.warning(f"{file} cannot be read ({error}), so parts of that run may stay elsewhere.")
        return
    for root, place in places.items():
        found = None
        with suppress(OSError, ValueError):
            found = read_regular(Path(place, _ELSEWHERE))
        if found == _mark(aside):
            yield Path(place), Path(root)
        elif os.path.lexists(place):
            logger.warning(
                f"{place} stays as it is: {file} names it, but it has no {_ELSEWHERE} that says the same, "
                "as where a run folder was copied or moved."
            )


def _mark(aside: Path) -> bytes:
    return f"{aside.parent.resolve()} {aside.name.partition('-')[2]}".encode()


def _is_removed(aside: Path) -> bool:
    """Removes a folder with parts of a run on another file system. Returns whether it is gone.

    The ``elsewhere.json`` in it goes last, because a folder without this file would never be removed."""
    with suppress(OSError):
        for path in list(aside.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _ELSEWHERE:
                path.unlink()
        if os.listdir(aside) == [_ELSEWHERE]:
            shutil.rmtree(aside)
    return not aside.exists()


class Removal:
    """Removes replaced runs that nobody has continued, on a thread because that can take a while.

    Without ``job.overwrite``, this only continues removals that were interrupted.
    """

    def __init__(self, config: JobConfig) -> None:
        folder = config.job.dump_folder
        for path in earlier_runs(folder, "replaced") if config.job.overwrite else ():
            if not is_gone_on_with(path) and living_holder(path / LOCK_FILE) is None:
                with suppress(OSError):
                    path.rename(path.with_name(path.name.replace("replaced", "removing")))
        self._paths = earlier_runs(folder, "removing")
        self._thread = threading.Thread(target=self._run, name="run-removal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for path in self._paths:
            if all(list(map(_is_removed, (aside for aside, _ in _elsewhere(path))))):
                shutil.rmtree(path, ignore_errors=True)  # else the next run needs the note

    def close(self) -> None:
        """Waits a while for the removal; the next run in the folder removes the rest."""
        self._thread.join(_CLOSE_SECONDS)
