# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Files of JSON lines, one record for each line, each with the ``step`` that it belongs to."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.logs import logger

_MOST_UNWRITTEN = 64 * 2**20  # bytes


class RunLog:
    """A file of records, opened to continue after ``step``. Records of later steps are removed.

    With ``step`` 0 the file starts empty. No record is kept in memory: long runs have millions.
    """

    def __init__(self, path: Path, step: int) -> None:
        # Replaced at once, so that a process that is killed here does not lose old records.
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as kept:
                if step and path.exists():
                    records = read_records(path, path.open("rb"))
                    kept.writelines(line for line, record in records if record["step"] <= step)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        # Unbuffered, so that a line that could not be written does not wait in a buffer.
        self._stream = path.open("ab", buffering=0)
        self._path, self._unwritten, self._is_told = path, b"", False
        self._num_dropped = 0

    def add(self, record: dict[str, Any], separators: tuple[str, str] = (", ", ": ")) -> None:
        """Appends a record. If the disk is full, the record is written later, together with the next one.

        Beyond 64 MiB that wait for room, further records are dropped: samples would fill the memory.
        """
        if len(self._unwritten) >= _MOST_UNWRITTEN:
            self._flush()
        if len(self._unwritten) >= _MOST_UNWRITTEN:
            self._num_dropped += 1
            return
        line = strict_json.dumps(record, ensure_ascii=False, separators=separators)
        self._unwritten += (line + "\n").encode()
        self._flush()

    def read(self) -> list[dict[str, Any]]:
        written = (self._path.read_bytes() + self._unwritten).splitlines(keepends=True)
        found = read_records(self._path, written, are_metrics=True)
        return [record for _, record in found]

    def _flush(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._stream.write(self._unwritten) :]
        except OSError as error:
            if not self._is_told:
                logger.error(
                    f"{self._path} cannot be written now ({error.strerror}). Training goes on, and "
                    "what is missing there is written as soon as there is room."
                )
        self._is_told = bool(self._unwritten)

    def close(self) -> None:
        if not self._stream.closed:
            self._flush()
            if number := self._unwritten.count(b"\n"):
                logger.error(
                    f"{self._path} lacks its last {number} records: there was no room for them until the "
                    "end of the run."
                )
            if self._num_dropped:
                logger.error(f"{self._path} lacks {self._num_dropped} records of a full disk.")
            own = os.fstat(self._stream.fileno())
            with suppress(OSError):  # an empty file says nothing; another run may have one here
                if not own.st_size and os.path.samestat(own, self._path.stat()):
                    self._path.unlink()
        self._stream.close()


class NewRecords:
    """Reads the records that a run, in another process, adds to a log. Create it before the run starts.

    A resumed run replaces the file. Lines that the old file already had are left out. Steps that are
    repeated after ranks were restarted have new lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = set[int]()  # hashes, because a line has kilobytes
        self._file: BinaryIO | None = None
        self._take_lines()

    def take(self) -> list[dict[str, Any]]:
        """Returns the records since the last call. An incomplete last line is returned once it is complete."""
        return [record for _, record in read_records(self._path, self._take_lines())]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take_lines(self) -> list[bytes]:
        file = self._open()
        lines = list[bytes]()
        while file is not None and (line := file.readline()):
            if not line.endswith(b"\n"):
                file.seek(-len(line), os.SEEK_CUR)
                break
            if (key := hash(line)) not in self._seen:
                self._seen.add(key)
                lines.append(line)
        return lines

    def _open(self) -> BinaryIO | None:
        """Returns the open log, None if there is none yet. If the file was replaced, the new one is opened."""
        # Open until it is replaced, so that no other file can get its number.
        with suppress(FileNotFoundError):
            if self._file is None or not os.path.samestat(
                os.fstat(self._file.fileno()), self._path.stat()
            ):
                file = self._path.open("rb")
                self.close()
                self._file = file
        return self._file


def read_records(
    path: Path, lines: Iterable[bytes], *, are_metrics: bool = False
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line with its record. Damaged lines, such as the last of a killed process, are skipped.

    With ``are_metrics``, a line also counts as damaged if a value is neither a number nor null.
    """
    kinds = (int, float, type(None)) if are_metrics else (object,)
    for number, line in enumerate(lines, 1):
        record = None
        with suppress(ValueError, RecursionError):
            record = json.loads(line) if line.endswith(b"}\n") else None
        if (
            isinstance(record, dict)
            and type(record.get("step")) is int
            and all(isinstance(value, kinds) for value in record.values())
        ):
            yield line, record
        else:
            logger.warning(f"{path}:{number} is damaged or incomplete, and is left out.")
