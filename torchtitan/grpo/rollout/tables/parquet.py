# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A parquet file as a table, row group by row group."""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchtitan.grpo.rollout.tables.table import Table, check_column, renamed

logger = logging.getLogger(__name__)

_LARGE_GROUP_BYTES = 8 * 1024 * 1024
CACHE_BYTES = 256 * 1024 * 1024


class ParquetTable(Table):
    """Rows by number; what is decoded is a whole row group, and the last ones are kept.

    A file that decodes to ``cache_bytes`` or less is decoded once. In a larger one a shuffled
    stream decodes about one row group a prompt, so that small row groups pay.

    Args:
        path: The file. It must not change while it is open.
        rename: Columns renamed before use, old to new.
        column: The prompt column, after renaming.
        key: TOML key of ``path``, for messages.
        cache_bytes: Decoded row groups kept; the one in use is kept whatever its size.

    Raises:
        ValueError: The file cannot be read, or lacks a column.
    """

    def __init__(
        self,
        path: str,
        rename: Mapping[str, str],
        column: str,
        key: str,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        # Slow to import, and not needed for JSONL.
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
            raise ValueError(f"{key}: {path} cannot be read as parquet: {error}") from error
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
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
        # To the right of all starts that are at most i: row groups may be empty.
        group = int(np.searchsorted(self._starts, i, side="right")) - 1
        table = self._row_group(group, i)
        (row,) = table.slice(i - int(self._starts[group]), 1).to_pylist()
        return renamed(row, self._rename, self.where(i))

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
                "%s: its %d row groups, of up to %.0f MiB each, are more than the %.0f MiB that "
                "are kept decoded, and prompts in random order decode about one each. Write "
                "the file with fewer rows a group, such as 1000.",
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
            # One thread: the other cores are the servers' and the trainer's.
            table = self._file.read_row_group(group, use_threads=False)
        except self._errors as error:
            raise ValueError(
                f"{self.where(i)}: row group {group} cannot be decoded: {error}"
            ) from error
        self._cached[group] = table
        while len(self._cached) > 1 and self._num_cached_bytes() > self._cache_bytes:
            self._cached.popitem(last=False)
        return table

    def _num_cached_bytes(self) -> int:
        return sum(table.nbytes for table in self._cached.values())
