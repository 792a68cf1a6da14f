# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the column ``answer`` of a row: which texts are right answers, and what is none."""

import math
from collections.abc import Mapping
from typing import Any

COLUMN = "answer"
_SHOWN_CHARS = 80
_LISTS = list | tuple | set | frozenset
_REMEDY = "Correct or remove the row, or take another column with prompts.rename."


def right_answers(value: Any) -> list[str]:
    """Returns the texts that a value of the column ``answer`` holds; none if it is no answer.

    Any element of a list is a right answer. A number is right in each of its usual forms, and a
    boolean in those of Python and JSON. Arrays and scalars of numpy and pyarrow are read as well.

    Example: ``["1/2", 0.5]`` gives ``1/2`` and ``0.5``, ``21.0`` gives ``21`` and ``21.0``, and
    ``None``, NaN, ``[]`` and ``{}`` give nothing.
    """
    value = _plain(value)
    if isinstance(value, _LISTS):
        return list(dict.fromkeys(text for element in value for text in _texts(_plain(element))))
    return _texts(value)


def answer_problem(columns: Mapping[str, Any], function: str) -> str | None:
    """Says why the column ``answer`` of a row holds no right answer; ``None`` if it does.

    Every element of a list must be one.

    Args:
        columns: The columns of the row.
        function: The reward function that reads it, for the message.
    """
    if COLUMN not in columns:
        return f"the column {COLUMN!r} is missing, and {function} compares with it. {_REMEDY}"
    value = _plain(columns[COLUMN])
    elements = [_plain(element) for element in value] if isinstance(value, _LISTS) else [value]
    wrong = next(([element] for element in elements if not _texts(element)), [])
    if elements and not wrong:
        return None
    what = _describe(wrong[0]) if wrong else "an empty list"
    where = " within a list" if wrong and isinstance(value, _LISTS) else ""
    return (
        f"the column {COLUMN!r} is {what}{where}, and {function} compares with it. It must be a text, a "
        f"number, true or false, or a list of those, of which each is a right answer. "
        f"{_remedy(wrong[0] if wrong else None)}"
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
    if value is None or value != value:
        return "null" if value is None else "NaN"
    return f"{value!r:.{_SHOWN_CHARS}} of type {type(value).__name__}"


def _remedy(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        path = f"{COLUMN}.{next(iter(value))}"
        return f'Name the value within it, such as prompts.rename = {{ "{path}" = "{COLUMN}" }}.'
    return _REMEDY
