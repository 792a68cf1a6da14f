# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables of Arrow data: a parquet file, decoded one row group at a time, and a Hugging Face data set."""

import logging
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.grpo.rollout.tables.table import RowError, Table, renamed
from torchtitan.grpo.system.file_formats import UTF8_MARK, not_json_lines

logger = logging.getLogger(__name__)

_LARGE_GROUP_BYTES = 8 * 1024 * 1024
_HEAD_BYTES = 4096
_SLICE_ROWS = 256
CACHE_BYTES = 256 * 1024 * 1024


class _ArrowTable(Table):
    """A table whose rows are decoded in slices, much faster than single rows."""

    def __init__(
        self, path: str, names: list[str], rename: Mapping[str, str], column: str | None
    ) -> None:
        self.path, self._rename, self._column = path, dict(rename), column
        renamed(dict.fromkeys(names), rename, column, path)

    @abstractmethod
    def _slice(self, first: int, end: int) -> list[dict[str, Any]]:
        """Returns rows from ``first`` on: at least one, and none after ``end - 1``."""

    def row(self, i: int) -> dict[str, Any]:
        (row,) = self._slice(i, i + 1)
        return renamed(row, self._rename, self._column, self.where(i))

    def rows(self, first: int, end: int) -> Iterator[dict[str, Any] | RowError]:
        while first < end:
            try:
                found = self._slice(first, min(first + _SLICE_ROWS, end))
            except RowError as error:
                yield error
                first += 1
                continue
            for i, row in enumerate(found, start=first):
                try:
                    yield renamed(row, self._rename, self._column, self.where(i))
                except RowError as error:
                    yield error
            first += len(found)

    def where(self, i: int) -> str:
        return f"{self.path}, row {i}"


class ParquetTable(_ArrowTable):
    """A parquet file, which must not change while it is open.

    Whole row groups are decoded. Those used last are cached, up to ``cache_bytes``, but at least one.
    A shuffled stream over a file larger than the cache decodes about one row group per prompt.
    """

    def __init__(
        self,
        path: str,
        rename: Mapping[str, str],
        column: str | None,
        key: str,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        # Imported here, because it is slow to import and not needed for JSONL.
        import pyarrow
        import pyarrow.parquet

        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[int, Any] = OrderedDict()
        self._undecodable: dict[int, str] = {}
        self._errors = (pyarrow.ArrowException, OSError)
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except self._errors as error:
            raise ValueError(
                f"{key}: {path} cannot be read as parquet: {_found_instead(path) or error}"
            ) from error
        metadata = self._file.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)])
        sizes = [group.total_byte_size for group in groups]
        self.num_bytes = sum(sizes)
        try:
            super().__init__(path, self._file.schema_arrow.names, rename, column)
        except ValueError:
            self.close()
            raise
        if self.num_bytes > cache_bytes and max(sizes) > _LARGE_GROUP_BYTES:
            logger.warning(
                "%s: its %d row groups, of up to %.0f MiB each, do not fit in the cache of %.0f "
                "MiB, so prompts in random order decode about one row group each. Write the "
                "file with fewer rows per group, for example 1000.",
                path, len(sizes), max(sizes) / 2**20, cache_bytes / 2**20,
            )  # fmt: skip

    def __len__(self) -> int:
        return int(self._starts[-1])

    def close(self) -> None:
        self._cached.clear()
        self._file.close()

    def _slice(self, first: int, end: int) -> list[dict[str, Any]]:
        # side="right" skips empty row groups, which start at the same row.
        group = int(np.searchsorted(self._starts, first, side="right")) - 1
        begin, stop = (int(start) for start in self._starts[group : group + 2])
        rows = self._row_group(group, first).slice(first - begin, min(end, stop) - first)
        return rows.to_pylist()

    def _row_group(self, group: int, i: int) -> Any:
        if group in self._cached:
            self._cached.move_to_end(group)
            return self._cached[group]
        try:
            if group not in self._undecodable:
                # In one thread, because the servers and the trainer need the other cores.
                self._cached[group] = self._file.read_row_group(group, use_threads=False)
        except self._errors as error:
            self._undecodable[group] = str(error)
        if group in self._undecodable:
            raise RowError(
                f"{self.where(i)}: row group {group} cannot be decoded: {self._undecodable[group]}"
            )
        while len(self._cached) > 1 and self._num_cached_bytes() > self._cache_bytes:
            self._cached.popitem(last=False)
        return self._cached[group]

    def _num_cached_bytes(self) -> int:
        return sum(table.nbytes for table in self._cached.values())


def _found_instead(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES).lstrip()
    except OSError:
        return None
    if head.removeprefix(UTF8_MARK).startswith(b"{"):
        return "it is JSON. Rename it so that its name ends in .jsonl."
    is_parquet = head.startswith(b"PAR1")
    return None if is_parquet else not_json_lines(head.split(b"\n")[0], path, is_first=True)


class HfDatasetTable(_ArrowTable):
    """A split of a Hugging Face data set: saved to disk, in local files, or from the hub."""

    def __init__(
        self,
        path: str,
        split: str,
        rename: Mapping[str, str],
        column: str | None,
        key: str,
        name: str | None = None,
    ) -> None:
        self._dataset = _load_dataset(path, name, split, key)
        where = f"{path} (split {split!r})"
        super().__init__(where, self._dataset.column_names, rename, column)

    def __len__(self) -> int:
        return len(self._dataset)

    def _slice(self, first: int, end: int) -> list[dict[str, Any]]:
        columns = self._dataset[first:end]  # a dictionary of columns
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]


def _load_dataset(path: str, name: str | None, split: str, key: str) -> Any:
    # Imported here, because it is slow to import and not needed for files.
    import datasets

    try:
        if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "state.json").is_file():
            loaded = datasets.load_from_disk(path)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(path, name, split=split)
    except Exception as error:  # the library raises many types of errors, for files and network
        named = f"configuration {name!r} and " if name else ""
        raise ValueError(
            f"{key}: {path!r} is neither a readable .jsonl or .parquet file nor a Hugging Face "
            f"data set with {named}split {split!r}: {type(error).__name__}: {error}"
        ) from error
