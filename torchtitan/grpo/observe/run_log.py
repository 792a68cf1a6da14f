# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Files of JSON lines, one record for each line, each with the ``step`` that it belongs to."""

import json
import os
from pathlib import Path
from typing import Any


class RunLog:
    """A file of records that a resumed run continues from its checkpoint on.

    Args:
        path: The file.
        step: Number of batches that the run has been trained on so far. Records of later steps
            are dropped, since those steps are taken again. With 0 the file starts empty.

    Attributes:
        records: All records of the run, including those of earlier processes.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.records: list[dict[str, Any]] = []
        if step and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            # A process that was killed may have left an incomplete last line.
            whole = [json.loads(line) for line in lines if line.endswith("}")]
            self.records = [record for record in whole if record["step"] <= step]
        # Replaced at once, so that a process that is killed here does not lose old records.
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="utf-8") as self._file:
            for record in self.records:
                self._write(record)
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def add(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        self.records.append(record)
        self._write(record)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
