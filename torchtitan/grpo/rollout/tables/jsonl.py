# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A JSONL file as a table. Only the positions of its lines are held in memory."""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from torchtitan.grpo.rollout.tables.line_index import index_lines
from torchtitan.grpo.rollout.tables.table import RowError, Table, no_such_column, renamed
from torchtitan.grpo.system.file_formats import UTF8_MARK, not_json_lines


class JsonlTable(Table):
    """Reads a file with one JSON object per line. Blank lines and byte-order marks are skipped.

    Args:
        path: The file. It must not change while it is open.
        rename: Columns renamed before use, from old to new name.
        column: The prompt column, after renaming.
        key: TOML key of ``path``, for messages.

    Raises:
        ValueError: If the file, or its first line, cannot be read.
    """

    def __init__(self, path: str, rename: Mapping[str, str], column: str, key: str) -> None:
        self.path = path
        self._key = key
        self._column = column
        self._rename = dict(rename)
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - kept open for row()
            self._lines = index_lines(self._file)
        except OSError as error:
            raise ValueError(f"{key}: {path} cannot be read: {error.strerror}.") from error
        self.num_bytes = self._lines.num_bytes
        try:
            if len(self):
                self.row(0)  # a file of another format is told as such at once
        except ValueError:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, i: int) -> dict[str, Any]:
        start, length = self._lines.span(i)
        return self._parse(self._read(start, length, i), i)

    def where(self, i: int) -> str:
        return f"{self.path}:{self._lines.line_number(i)}"

    def close(self) -> None:
        self._file.close()

    def _read(self, start: int, length: int, i: int) -> bytes:
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

    def _parse(self, line: bytes, i: int) -> dict[str, Any]:
        # Called for every line of a file, so the location is formatted only for errors.
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
        if self._rename:
            row = renamed(row, self._rename, self.where(i))
        if self._column not in row:
            raise no_such_column(row, self._column, self.where(i))
        return row
