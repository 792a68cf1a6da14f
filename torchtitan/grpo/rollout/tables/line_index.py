# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds where the lines of a file begin, without parsing their content.

numpy searches for newlines in blocks that stay in the processor's cache. Eight bytes per row
are kept in memory.
"""

import io
from array import array
from bisect import bisect_right

import numpy as np

from torchtitan.grpo.system.file_formats import UTF8_MARK

_BLOCK_BYTES = 1 << 20
_NEWLINE = 10
# The characters that bytes.strip() removes.
_IS_BLANK = np.zeros(256, dtype=bool)
_IS_BLANK[list(b" \t\n\r\x0b\x0c")] = True


class LineIndex:
    """Positions of the lines of a file that are not blank, called rows here.

    Args:
        starts: [num_rows + 1] int64, byte offsets of the rows, and of the end of the file. The
            range between two offsets contains one row and any blank lines that follow it.
        rows_before_blank: [num_blank] int64, number of rows before each blank line.
    """

    def __init__(self, starts: np.ndarray, rows_before_blank: np.ndarray) -> None:
        self._starts = starts
        # bisect on an array: numpy's search takes longer than parsing a row.
        self._rows_before_blank = array("q", rows_before_blank.astype(np.int64).tobytes())

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def num_bytes(self) -> int:
        """Size of the file when it was indexed, in bytes."""
        return int(self._starts[-1])

    def span(self, row: int) -> tuple[int, int]:
        """Returns the byte offset and the length of a row."""
        start = int(self._starts[row])
        return start, int(self._starts[row + 1]) - start

    def block(self, row: int, num_bytes: int) -> np.ndarray:
        """Returns the byte offsets of the rows that fit into ``num_bytes``, and of their end.

        The block starts at ``row`` and contains at least one row.
        """
        fitting = np.searchsorted(self._starts, self._starts[row] + num_bytes, side="right") - 1
        return self._starts[row : max(int(fitting), row + 1) + 1]

    def line_number(self, row: int) -> int:
        """Returns the number of the row's line in the file, from 1, counting blank lines."""
        return row + 1 + bisect_right(self._rows_before_blank, row)


def index_lines(file: io.FileIO, block_bytes: int = _BLOCK_BYTES) -> LineIndex:
    """Reads an open file once to its end, ``block_bytes`` at a time.

    A byte-order mark at its beginning belongs to no line.

    Raises:
        OSError: If the file cannot be read.
    """
    starts, suspects, num_bytes = _scan(file, block_bytes)
    ends = np.append(starts[1:], num_bytes)
    file.seek(0)
    if file.read(len(UTF8_MARK)) == UTF8_MARK:
        starts[0] = len(UTF8_MARK)
        suspects = np.insert(suspects, 0, 0)
    is_blank = np.zeros(len(starts), dtype=bool)
    for line in suspects:
        is_blank[line] = _is_blank(file, int(starts[line]), int(ends[line]))
    rows_before = np.cumsum(~is_blank)[is_blank]
    return LineIndex(np.append(starts[~is_blank], num_bytes), rows_before)


def _scan(file: io.FileIO, block_bytes: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the offsets of all lines, the lines that begin with a blank, and the file's size."""
    buffer = bytearray(block_bytes)
    block = np.frombuffer(buffer, dtype=np.uint8)
    starts = [np.empty(0, dtype=np.int64)]
    suspects = [np.empty(0, dtype=np.int64)]
    num_bytes = num_lines = 0
    at_line_start = True
    while size := file.readinto(buffer):
        content = block[:size]
        found = np.flatnonzero(content == _NEWLINE) + 1
        if at_line_start:
            found = np.insert(found, 0, 0)
        at_line_start = bool(content[-1] == _NEWLINE)
        if at_line_start:
            found = found[:-1]  # this line begins in the next block, if there is one
        starts.append(found + num_bytes)
        suspects.append(np.flatnonzero(_IS_BLANK[content[found]]) + num_lines)
        num_bytes += size
        num_lines += len(found)
    return np.concatenate(starts), np.concatenate(suspects), num_bytes


def _is_blank(file: io.FileIO, start: int, end: int) -> bool:
    # In blocks, because a file may be one long line of blanks.
    file.seek(start)
    while start < end:
        content = file.read(min(end - start, _BLOCK_BYTES))
        if not content or content.strip():
            return not content
        start += len(content)
    return True
