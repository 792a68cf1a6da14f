# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A JSONL file as a table. Only the positions of its lines are held in memory."""

import logging
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from torchtitan.grpo.rollout.tables.line_index import index_lines
from torchtitan.grpo.rollout.tables.row_check import FULL_CHECK_BYTES, BackgroundCheck, sample_rows
from torchtitan.grpo.rollout.tables.table import Table, no_such_column, renamed

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 64 * 1024


class JsonlTable(Table):
    """Reads a file with one JSON object per line. Blank lines are skipped.

    Invalid lines are found before training or, in a large file, soon after its start; see
    :mod:`.row_check`.

    Args:
        path: The file. It must not change while it is open.
        rename: Columns renamed before use, from old to new name.
        column: The prompt column, after renaming.
        key: TOML key of ``path``, for messages.
        full_check_bytes: Larger files are checked in the background.

    Raises:
        ValueError: If the file, or a line that was checked, cannot be read.
    """

    def __init__(
        self,
        path: str,
        rename: Mapping[str, str],
        column: str,
        key: str,
        full_check_bytes: int = FULL_CHECK_BYTES,
    ) -> None:
        self.path = path
        self._key = key
        self._column = column
        self._rename = dict(rename)
        self._background: BackgroundCheck | None = None
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - kept open for row()
            self._lines = index_lines(self._file)
        except OSError as error:
            raise ValueError(f"{key}: {path} cannot be read: {error.strerror}.") from error
        try:
            self._check(full_check_bytes)
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

    def check(self) -> None:
        if self._background is not None:
            self._background.raise_error()

    def wait_until_checked(self, timeout_seconds: float) -> None:
        """Waits for the background check, if there is one.

        Raises:
            TimeoutError: If the check takes longer.
        """
        if self._background is not None:
            self._background.wait(timeout_seconds)

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
        self._file.close()

    def _check(self, full_check_bytes: int) -> None:
        if self._lines.num_bytes <= full_check_bytes:
            checked = 0
            while checked < len(self):
                checked = self._check_block(checked)
            return
        sample = sample_rows(len(self))
        for i in sample:
            self.row(i)
        logger.info(
            "%s: %d of the %d rows of %s are checked. The others are checked during the run.",
            self._key,
            len(sample),
            len(self),
            self.path,
        )
        self._background = BackgroundCheck(self._check_block, len(self), self.path)

    def _check_block(self, first: int) -> int:
        """Checks some rows from ``first`` on, and returns the number of the next row."""
        starts = self._lines.block(first, _BLOCK_BYTES).tolist()
        content = self._read(starts[0], starts[-1] - starts[0], first)
        for i, (start, end) in enumerate(pairwise(starts), start=first):
            self._parse(content[start - starts[0] : end - starts[0]], i)
        return first + len(starts) - 1

    def _read(self, start: int, length: int, i: int) -> bytes:
        try:
            # pread and not seek, because the check's thread reads the same file.
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
            row = msgspec.json.decode(line.strip())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f"{self.where(i)}: every line of {self._key} must be a JSON object, but this "
                f"line is not JSON: {error}"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{self.where(i)}: every line of {self._key} must be a JSON object, got a "
                f"{type(row).__name__}."
            )
        if self._rename:
            row = renamed(row, self._rename, self.where(i))
        if self._column not in row:
            raise no_such_column(row, self._column, self.where(i))
        return row
