# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A JSONL file as a table. Only the positions of its lines are held in memory, eight bytes a row."""

import io
import os
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from torchtitan.grpo.rollout.tables.table import RowError, Table, renamed
from torchtitan.grpo.system.file_formats import UTF8_MARK, not_json_lines

_BLOCK_BYTES = 1 << 20  # stays in the processor's cache
_NEWLINE = 10
# The characters that bytes.strip() removes.
_IS_BLANK = np.zeros(256, dtype=bool)
_IS_BLANK[list(b" \t\n\r\x0b\x0c")] = True


class JsonlTable(Table):
    """A JSONL file, which must not change while it is open. Skips blank lines and byte-order marks."""

    def __init__(self, path: str, rename: Mapping[str, str], column: str | None, key: str) -> None:
        self.path = path
        self._key, self._column, self._rename = key, column, dict(rename)
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - kept open for row()
            self._starts, rows_before_blank = index_lines(self._file)
        except OSError as error:
            raise ValueError(f"{key}: {path} cannot be read: {error.strerror}.") from error
        # bisect on an array: numpy's search takes longer than parsing a row.
        self._rows_before_blank = array("q", rows_before_blank.tobytes())
        self.num_bytes = int(self._starts[-1])
        try:
            if len(self):
                self.row(0)  # a file of another format is told as such at once
        except ValueError:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, i: int) -> dict[str, Any]:
        # Called for every line of a file, so the location is formatted only for errors.
        line = self._read(i)
        try:
            # A mark stands at the beginning of each of the files that were joined to this one.
            row = msgspec.json.decode(line.strip().removeprefix(UTF8_MARK))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            found = not_json_lines(line, self.path, is_first=i == 0)
            raise RowError(
                f"{self.where(i)}: every line of {self._key} must be a JSON object, but this "
                f"line is not JSON: {found or error}"
            ) from error
        if not isinstance(row, dict):
            found = not_json_lines(line, self.path, is_first=i == 0)
            raise RowError(
                f"{self.where(i)}: every line of {self._key} must be a JSON object, got a "
                f"{type(row).__name__}" + (f": {found}" if found else ".")
            )
        if self._rename or (self._column is not None and self._column not in row):
            row = renamed(row, self._rename, self._column, self.where(i))
        return row

    def where(self, i: int) -> str:
        return f"{self.path}:{i + 1 + bisect_right(self._rows_before_blank, i)}"

    def close(self) -> None:
        self._file.close()

    def _read(self, i: int) -> bytes:
        start = int(self._starts[i])
        length = int(self._starts[i + 1]) - start
        try:
            content = os.pread(self._file.fileno(), length, start)
        except OSError as error:
            raise ValueError(f"{self.where(i)} cannot be read: {error.strerror}.") from error
        if len(content) < length:
            raise ValueError(
                f"{self.where(i)}: the file has become shorter since it was opened ({self._key}). "
                "It must not change while a run reads it."
            )
        return content


def index_lines(file: io.FileIO, block_bytes: int = _BLOCK_BYTES) -> tuple[np.ndarray, np.ndarray]:
    """Finds the rows of a JSONL file, which are its nonblank lines, without parsing them.

    The first result, [num_rows + 1] int64, holds the byte offset of each row and of the end of the
    file. Blank lines belong to the row before them. The second result, [num_blank] int64, holds the
    number of rows before each blank line.
    """
    starts, suspects = [np.empty(0, np.int64)], [np.empty(0, bool)]
    last, num_bytes = b"\n", 0
    while new := file.read(block_bytes):
        block = np.frombuffer(last + new, np.uint8)
        found = np.flatnonzero(block[:-1] == _NEWLINE)  # a line begins behind each of them
        starts.append(found + num_bytes)
        suspects.append(_IS_BLANK[block[found + 1]])
        last, num_bytes = new[-1:], num_bytes + len(new)
    begin, is_blank = np.concatenate(starts), np.concatenate(suspects)
    end = np.append(begin[1:], num_bytes)
    if os.pread(file.fileno(), len(UTF8_MARK), 0) == UTF8_MARK:  # it belongs to no line
        begin[0], is_blank[0] = len(UTF8_MARK), True
    for i in np.flatnonzero(is_blank):
        is_blank[i] = not os.pread(file.fileno(), int(end[i] - begin[i]), int(begin[i])).strip()
    return np.append(begin[~is_blank], num_bytes), np.cumsum(~is_blank)[is_blank]
