# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What every table of prompts has: rows by number, with renamed columns."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Table(ABC):
    """Random access to the rows of a table.

    Used by one thread at a time.
    """

    path: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, i: int) -> dict[str, Any]:
        """Row ``i`` with its columns renamed.

        Raises:
            ValueError: It cannot be read.
        """

    @abstractmethod
    def where(self, i: int) -> str:
        """Names row ``i`` in messages."""

    def check(self) -> None:  # noqa: B027 - most tables have nothing to say
        """Says what a check in the background has found until now.

        Raises:
            ValueError: A row is bad.
        """

    def close(self) -> None:  # noqa: B027
        """Lets go of files and threads; no row can be read any more."""


def renamed(row: Mapping[str, Any], rename: Mapping[str, str], where: str) -> dict[str, Any]:
    """The row under its new column names.

    Raises:
        ValueError: A column is not there, or a new name is taken.
    """
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


def check_column(row: Mapping[str, Any], column: str, where: str) -> None:
    """Refuses a row without the prompt column.

    Raises:
        ValueError: It is not there.
    """
    if column not in row:
        raise no_such_column(row, column, where)


def no_such_column(row: Mapping[str, Any], column: str, where: str) -> ValueError:
    """What is wrong with a row without the prompt column."""
    return ValueError(
        f"{where}: there is no column {column!r}. Columns: {sorted(row)}. Set prompts.column, "
        "or map a column to it with prompts.rename."
    )
