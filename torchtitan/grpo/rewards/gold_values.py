# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the column ``answer`` of a row: which texts are right answers, and what is none."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_SHOWN_CHARS = 80


def right_answers(value: Any) -> list[str]:
    """Returns the texts that a value of the column ``answer`` holds; none if it is no answer.

    Any element of a list is a right answer. A number is right in each of its usual forms, and a
    boolean in those of Python and JSON. Arrays and scalars of numpy and pyarrow are read as well.

    Example: ``["1/2", 0.5]`` gives ``1/2`` and ``0.5``, ``21.0`` gives ``21`` and ``21.0``, and
    ``None``, NaN, ``[]`` and ``{}`` give nothing.
    """
    value = _plain(value)
    if isinstance(value, list | tuple | set | frozenset):
        return list(dict.fromkeys(text for element in value for text in _texts(_plain(element))))
    return _texts(value)


def answer_problem(columns: Mapping[str, Any], column: str = "answer") -> str | None:
    """Says why a row holds no right answer; ``None`` if it holds one.

    Args:
        columns: The columns of the row.
        column: The column of the answer. A row without it has no problem: that the column is
            missing is found for the whole set.
    """
    if column not in columns:
        return None
    value = _plain(columns[column])
    elements: Sequence[Any] = list(value) if isinstance(value, list | tuple | set) else [value]
    bad = next((element for element in elements if not _texts(_plain(element))), None)
    if elements and bad is None and None not in elements:
        return None
    what = "an empty list" if not elements else _describe(_plain(bad))
    within = " in a list" if bad is not value and elements else ""
    return (
        f"the column {column!r} must hold a text, a number, a boolean, or a list of those, of which each "
        f"is a right answer, got {what}{within}. {_remedy(value, column)}"
    )


def _plain(value: Any) -> Any:
    """Returns the Python value of a scalar or an array of numpy or pyarrow."""
    for method in ("as_py", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, bytes):
        try:
            return [value.decode()]
        except UnicodeDecodeError:
            return []
    if isinstance(value, bool):
        return [str(value), str(value).lower()]
    if isinstance(value, int):
        return [str(value)]
    # Decimal and Fraction too; complex numbers have no such method.
    if not hasattr(value, "__float__") or not math.isfinite(value):
        return []
    whole = [str(int(value))] if value == int(value) else []
    return [*whole, str(value)]


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value!r:.{_SHOWN_CHARS}} of type {type(value).__name__}"


def _remedy(value: Any, column: str) -> str:
    if isinstance(value, Mapping) and value:
        key = next(iter(value))
        return (
            f'Name the value within it by a path, such as prompts.rename = {{ "{column}.{key}" = '
            f'"{column}" }}.'
        )
    return "Correct or remove the row, or take another column with prompts.rename."
