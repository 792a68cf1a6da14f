# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The files of a checkpoint: written whole or not at all, and checked before they are used.

A checkpoint is whole once its `.metadata` exists. This file is written in one piece and last, after
each rank's sizes and checksums (`sums_<rank>.json`). A step's earlier checkpoint is removed first.
"""

import os
import shutil
import zlib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.grpo.run_folder.contents import steps_in
from torchtitan.grpo.system.files import Sums, read_sums, sync_folder, write_sums

METADATA_FILE = ".metadata"


class CheckpointWriter(FileSystemWriter):
    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path)
        self.fs = self._files = _SummingFileSystem()
        self._leads = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._leads = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # No rank writes, or makes the folder, before the coordinator has made a plan for all.
        if not self._leads:
            return plan
        Path(self.path).parent.mkdir(exist_ok=True)
        clear_folder(Path(self.path))
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.fs.mkdir(self.path)
        written = super().write_data(plan, planner)
        self._files.write_sums(Path(self.path) / f"sums_{self.rank or 0}.json")
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        sync_folder(Path(self.path))


class _SummingFileSystem(FileSystem):
    def __init__(self) -> None:
        self._sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as stream:
            summing = _SummingStream(stream)
            yield summing
        self._sums[Path(path).name] = summing.size, summing.crc

    def mkdir(self, path: str | os.PathLike) -> None:
        Path(path).mkdir(exist_ok=True)  # not its folder's, which may have been removed

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        path, new_path = Path(path), Path(new_path)
        self._sums = {new_path.name: self._sums[path.name]}
        self.write_sums(new_path.with_name(f"sums_{new_path.name.lstrip('.')}.json"))
        super().rename(path, new_path)

    def write_sums(self, file: Path) -> None:
        write_sums(file, self._sums)


class _SummingStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = self.crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def clear_folder(folder: Path) -> None:
    """Removes the files of a checkpoint, first the ``.metadata`` that marks it as whole."""
    if folder.is_dir():
        (folder / METADATA_FILE).unlink(missing_ok=True)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def is_whole(folder: Path) -> bool:
    return (folder / METADATA_FILE).is_file() or (folder / "model.safetensors.index.json").is_file()


def whole_steps(checkpoints: Path) -> list[int]:
    return [step for step in steps_in(checkpoints) if is_whole(checkpoints / f"step-{step}")]


def remove_incomplete(checkpoints: Path) -> list[Path]:
    """Removes the remains of interrupted saves, and returns them. Call on one rank while nothing is saved."""
    left = [p for p in checkpoints.glob("step-*") if p.is_dir() and not is_whole(p)]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # it holds something
        checkpoints.rmdir()
    return left


def quick_problem(folder: Path) -> str | None:
    """Returns why a checkpoint is damaged, or None, judging only by the names and sizes of its files."""
    if not (folder / METADATA_FILE).is_file():
        return None
    try:
        sums = read_sums(folder)
        ends: dict[str, int] = {}
        metadata = cast(Any, FileSystemReader(folder).read_metadata())
        for info in metadata.storage_data.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    except (Exception, CheckpointException) as error:  # pickle raises whatever it likes
        return f"its .metadata cannot be read ({type(error).__name__}: {error})".splitlines()[0]
    for name, end in sorted(ends.items()):
        if not (folder / name).is_file():
            return f"{name} is missing"
        size, expected = (folder / name).stat().st_size, sums.get(name, (None, 0))[0]
        if size < end or (expected is not None and size != expected):
            return f"{name} has {size} bytes instead of {expected or end}"
    return None
