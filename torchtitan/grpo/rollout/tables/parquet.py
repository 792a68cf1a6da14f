# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A parquet file as a table, decoded one row group at a time."""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from torchtitan.grpo.rollout.tables.table import (
    RowError,
    Table,
    check_column,
    renamed,
    renamed_or_error,
)
from torchtitan.grpo.system.file_formats import UTF8_MARK, not_json_lines

logger = logging.getLogger(__name__)

_LARGE_GROUP_BYTES = 8 * 1024 * 1024
_HEAD_BYTES = 4096
_SLICE_ROWS = 256
CACHE_BYTES = 256 * 1024 * 1024


class ParquetTable(Table):
    """Reads rows by number. A whole row group is decoded at a time, and recent ones are cached.

    A file that decodes to ``cache_bytes`` or less is decoded once. A shuffled stream over a larger
    file decodes about one row group per prompt, so small row groups are faster there.

    Args:
        path: The file. It must not change while it is open.
        rename: Columns renamed before use, from old to new name.
        column: The prompt column, after renaming.
        key: TOML key of ``path``, for messages.
        cache_bytes: Size of the cache of decoded row groups. The row group in use is always kept.

    Raises:
        ValueError: If the file cannot be read, or lacks a column.
    """

    def __init__(
        self,
        path: str,
        rename: Mapping[str, str],
        column: str,
        key: str,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        # Imported here, because it is slow to import and not needed for JSONL.
        import pyarrow
        import pyarrow.parquet

        self.path = path
        self._rename = dict(rename)
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[int, Any] = OrderedDict()
        self._errors = (pyarrow.ArrowException, OSError)
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except self._errors as error:
            raise ValueError(
                f"{key}: {path} cannot be read as parquet: {_found_instead(path) or error}"
            ) from error
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self.num_bytes = sum(
            metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)
        )
        self._starts = np.cumsum([0, *sizes])
        try:
            names = dict.fromkeys(self._file.schema_arrow.names)
            check_column(renamed(names, self._rename, path), column, path)
        except ValueError:
            self.close()
            raise
        self._warn_of_large_groups()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, i: int) -> dict[str, Any]:
        # side="right" skips empty row groups, which start at the same row.
        group = int(np.searchsorted(self._starts, i, side="right")) - 1
        table = self._row_group(group, i)
        (row,) = table.slice(i - int(self._starts[group]), 1).to_pylist()
        return renamed(row, self._rename, self.where(i))

    def rows(self, first: int, end: int) -> Iterator[dict[str, Any] | RowError]:
        while first < end:
            group = int(np.searchsorted(self._starts, first, side="right")) - 1
            begin, stop = int(self._starts[group]), min(end, int(self._starts[group + 1]))
            size = min(_SLICE_ROWS, stop - first)
            try:
                found = self._row_group(group, first).slice(first - begin, size).to_pylist()
            except RowError as error:
                yield from (error for _ in range(first, stop))
                first = stop
                continue
            for i, row in enumerate(found, start=first):
                yield renamed_or_error(row, self._rename, self.where(i))
            first += size

    def where(self, i: int) -> str:
        return f"{self.path}, row {i}"

    def close(self) -> None:
        self._cached.clear()
        self._file.close()

    def _warn_of_large_groups(self) -> None:
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        if sum(sizes) > self._cache_bytes and max(sizes) > _LARGE_GROUP_BYTES:
            logger.warning(
                "%s: its %d row groups, of up to %.0f MiB each, do not fit in the cache of %.0f "
                "MiB, so prompts in random order decode about one row group each. Write the "
                "file with fewer rows per group, for example 1000.",
                self.path,
                len(sizes),
                max(sizes) / 2**20,
                self._cache_bytes / 2**20,
            )

    def _row_group(self, group: int, i: int) -> Any:
        if group in self._cached:
            self._cached.move_to_end(group)
            return self._cached[group]
        try:
            # In one thread, because the servers and the trainer need the other cores.
            table = self._file.read_row_group(group, use_threads=False)
        except self._errors as error:
            raise RowError(
                f"{self.where(i)}: row group {group} cannot be decoded: {error}"
            ) from error
        self._cached[group] = table
        while len(self._cached) > 1 and self._num_cached_bytes() > self._cache_bytes:
            self._cached.popitem(last=False)
        return table

    def _num_cached_bytes(self) -> int:
        return sum(table.nbytes for table in self._cached.values())


def _found_instead(path: str) -> str | None:
    """Says what a file is that is not in parquet; ``None`` if that is not known."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES).lstrip()
    except OSError:
        return None
    if head.removeprefix(UTF8_MARK).startswith(b"{"):
        return "it is JSON. Rename it so that its name ends in .jsonl."
    is_parquet = head.startswith(b"PAR1")
    return None if is_parquet else not_json_lines(head.split(b"\n")[0], path, is_first=True)
