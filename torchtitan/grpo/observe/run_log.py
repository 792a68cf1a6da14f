# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Files of JSON lines, one record for each line, each with the ``step`` that it belongs to."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RunLog:
    """A file of records that a resumed run continues from its checkpoint on.

    Records are not kept in memory: a run of weeks has millions of them.

    Args:
        path: The file.
        step: Number of batches that the run has been trained on so far. Records of later steps
            are dropped, since those steps are taken again. With 0 the file starts empty.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        # Replaced at once, so that a process that is killed here does not lose old records.
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="utf-8") as kept:
            if step and path.exists():
                kept.writelines(
                    line for line in _whole_lines(path) if json.loads(line)["step"] <= step
                )
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def add(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Returns all records of the run, including those of earlier processes."""
        return [json.loads(line) for line in _whole_lines(self._path)]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _whole_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file. A process that was killed may have left an incomplete last one."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("}\n"):
                yield line
