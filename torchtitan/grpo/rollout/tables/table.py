# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The interface of all tables of prompts: rows by number, with renamed columns."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class RowError(ValueError):
    """One row cannot be used; the others can. The message begins with the row's location."""


class Table(ABC):
    """Random access to rows. Only one thread at a time may use it.

    Methods raise a `RowError` for a row that cannot be used, and another ``ValueError`` if the
    table cannot be read any more. ``num_bytes`` is its size, or 0 if that is not known.
    """

    path: str
    num_bytes: int = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, i: int) -> dict[str, Any]: ...

    def rows(self, first: int, end: int) -> Iterator[dict[str, Any] | RowError]:
        """Yields the rows ``first`` to ``end - 1``. In place of a row that cannot be used, yields its error."""
        for i in range(first, end):
            try:
                yield self.row(i)
            except RowError as error:
                yield error

    @abstractmethod
    def where(self, i: int) -> str:
        """The location of row ``i`` for messages."""

    def close(self) -> None:  # noqa: B027
        """Closes files. No row can be read afterwards."""


class PartTable(Table):
    """A slice of a table's rows. ``bounds`` are its start and stop, each as text or None."""

    def __init__(self, table: Table, bounds: Iterable[str | None]) -> None:
        numbers = slice(*(int(text) if text else None for text in bounds))
        self._table, self._numbers = table, range(len(table))[numbers]
        self.path, self.num_bytes, self.close = table.path, table.num_bytes, table.close

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, i: int) -> dict[str, Any]:
        return self._table.row(self._numbers[i])

    def where(self, i: int) -> str:
        return self._table.where(self._numbers[i])


def renamed(
    row: Mapping[str, Any], rename: Mapping[str, str], column: str | None, where: str
) -> dict[str, Any]:
    """Returns the row with its new column names, or raises :class:`RowError`.

    An old name that is no column is a path, such as ``reward_model.ground_truth``. The value at this
    path is copied to a column with the new name, and the original column stays.
    """
    result = {rename.get(name, name): value for name, value in row.items()}
    for old, new in rename.items():
        if new in row and new not in rename and new != old.partition(".")[0]:
            raise RowError(
                f"{where}: prompts.rename would overwrite the column {new!r} with {old!r}. "
                "Rename that column as well."
            )
        if old not in row:
            result[new] = _within(row, old, where)
    if column is not None and column not in result:
        raise RowError(
            f"{where}: there is no column {column!r}. Existing columns: {sorted(result)}. Set "
            "prompts.column, or rename a column to it with prompts.rename."
        )
    return result


def _within(row: Mapping[str, Any], path: str, where: str) -> Any:
    """The value at a path, which consists of a column's name and then keys or list indices."""
    value: Any = row
    for depth, name in enumerate(names := path.split(".")):
        if value is None:  # as in a row of a parquet file whose column holds nothing
            return None
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif depth == 0:
            raise RowError(
                f"{where}: prompts.rename names the column {path!r}, which does not exist. "
                f"Existing columns: {sorted(row)}."
            )
        else:
            found = f"keys {sorted(value)}" if isinstance(value, Mapping) else f"{value!r:.80}"
            raise RowError(
                f"{where}: prompts.rename names {path!r}, but {'.'.join(names[:depth])} has no "
                f"{name!r}, got {found}. Correct the path."
            )
    return value
