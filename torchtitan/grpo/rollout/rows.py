# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables of prompts: a JSONL file or a Hugging Face data set, read row by row.

Rows are not held in memory: of a JSONL file only the lines' positions are.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class Rows(ABC):
    """Random access to the rows of a table."""

    path: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, i: int) -> dict[str, Any]:
        """Row ``i`` with its columns renamed."""

    @abstractmethod
    def where(self, i: int) -> str:
        """Names row ``i`` in messages."""


def open_rows(
    path: str,
    split: str,
    rename: Mapping[str, str],
    column: str,
    key: str,
    name: str | None = None,
) -> Rows:
    """Opens a table and checks that it has rows with a prompt column.

    Args:
        path: A ``.jsonl`` file, or the name or directory of a Hugging Face data set.
        split: Split of a Hugging Face data set.
        rename: Columns renamed before use, old to new.
        column: The prompt column, after renaming.
        key: TOML key of ``path``, for messages.
        name: Configuration of a Hugging Face data set that has several.

    Raises:
        ValueError: Anything is wrong with the table; the message names ``key``.
    """
    if not path:
        raise ValueError(f"{key} must name a .jsonl file or a Hugging Face data set, got ''.")
    if path.endswith((".jsonl", ".json")) or Path(path).is_file():
        rows: Rows = JsonlRows(path, rename, column, key)
    else:
        rows = DatasetRows(path, split, rename, column, key, name)
    if len(rows) == 0:
        raise ValueError(f"{key}: {path} holds no prompt. Give a file with at least one row.")
    return rows


class JsonlRows(Rows):
    """A JSON object a line. Blank lines are passed over.

    The whole file is read once, at construction, so that a bad line is found before
    training and not hours into it.
    """

    def __init__(self, path: str, rename: Mapping[str, str], column: str, key: str) -> None:
        self.path = path
        self._key = key
        self._rename = dict(rename)
        self._offsets = array("q")
        self._line_numbers = array("q")
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - kept open for row()
        except OSError as error:
            raise ValueError(f"{key}: {path} cannot be read: {error.strerror}.") from error
        self._index(column)

    def _index(self, column: str) -> None:
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                where = f"{self.path}:{number}"
                row = _renamed(_parse(line, where, self._key), self._rename, where)
                _check_column(row, column, where)
                self._offsets.append(offset)
                self._line_numbers.append(number)
            offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, i: int) -> dict[str, Any]:
        self._file.seek(self._offsets[i])
        line = self._file.readline()
        return _renamed(_parse(line, self.where(i), self._key), self._rename, self.where(i))

    def where(self, i: int) -> str:
        return f"{self.path}:{self._line_numbers[i]}"


class DatasetRows(Rows):
    """A split of a Hugging Face data set, saved to disk, local, or from the hub."""

    def __init__(
        self,
        path: str,
        split: str,
        rename: Mapping[str, str],
        column: str,
        key: str,
        name: str | None = None,
    ) -> None:
        self.path = f"{path} (split {split!r})"
        self._rename = dict(rename)
        self._dataset = _load_dataset(path, name, split, key)
        names = dict.fromkeys(self._dataset.column_names)
        _check_column(_renamed(names, self._rename, self.path), column, self.path)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, i: int) -> dict[str, Any]:
        return _renamed(self._dataset[i], self._rename, self.where(i))

    def where(self, i: int) -> str:
        return f"{self.path}, row {i}"


def _load_dataset(path: str, name: str | None, split: str, key: str) -> Any:
    # Slow to import, and not needed for JSONL.
    import datasets

    try:
        if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "state.json").is_file():
            loaded = datasets.load_from_disk(path)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(path, name, split=split)
    except Exception as error:  # the library raises many kinds, from files and network alike
        named = f"configuration {name!r} and " if name else ""
        raise ValueError(
            f"{key}: {path!r} is neither a readable .jsonl file nor a Hugging Face data set with "
            f"{named}split {split!r}: {type(error).__name__}: {error}"
        ) from error


def _parse(line: bytes, where: str, key: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{where}: every line of {key} must be a JSON object, and this one is not JSON: {error}"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: every line of {key} must be a JSON object, got a {type(row).__name__}."
        )
    return row


def _renamed(row: dict[str, Any], rename: Mapping[str, str], where: str) -> dict[str, Any]:
    for old, new in rename.items():
        if old not in row:
            raise ValueError(
                f"{where}: prompts.rename names the column {old!r}, which is not there. "
                f"Columns: {sorted(row)}."
            )
        if new in row and new not in rename:
            raise ValueError(
                f"{where}: prompts.rename would overwrite the column {new!r} with {old!r}. "
                "Rename that one as well."
            )
    return {rename.get(name, name): value for name, value in row.items()}


def _check_column(row: Mapping[str, Any], column: str, where: str) -> None:
    if column not in row:
        raise ValueError(
            f"{where}: there is no column {column!r}. Columns: {sorted(row)}. Set prompts.column, "
            "or map a column to it with prompts.rename."
        )
