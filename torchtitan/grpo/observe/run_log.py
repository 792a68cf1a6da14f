# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Records of a run, one JSON object a line, each with its ``step``."""

import json
import os
from pathlib import Path
from typing import Any


class RunLog:
    """A file of records that a resumed run continues where its checkpoint was.

    Args:
        path: The file.
        step: Batches already trained on. Records of later steps are dropped: those
            steps are taken again. 0 begins anew.

    Attributes:
        records: All of the run, those of former processes included.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.records: list[dict[str, Any]] = []
        if step and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            # A process that was killed may have left half a line.
            whole = [json.loads(line) for line in lines if line.endswith("}")]
            self.records = [record for record in whole if record["step"] <= step]
        # Whole or not at all: a process that is killed now must not have lost what was there.
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
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
