# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads and writes JSON without ``NaN`` and ``Infinity``, which Python allows but jq and browsers refuse."""

import json
import math
import sys
from contextlib import suppress
from typing import Any

COUNT_KEY = "nonfinite_values"
"""Key of an object that says how many of its numbers were not finite; it is absent if all were."""
Found = dict[str, Any]
"""What a command finds. Its text and its JSON (--json) are written from this."""
_MOST_NESTED = 100  # What copies or renders JSON takes stack for each level.


def loads(text: str) -> Any:
    """Reads untrusted JSON. Raises ValueError if it is malformed, nested too deeply, or holds NaN."""
    text = text.strip()
    value, end = load_at(text, 0)
    if end < len(text):
        raise ValueError(f"there is more behind the JSON, at character {end}")
    return value


def load_at(text: str, place: int) -> tuple[Any, int]:
    """Reads the JSON value that begins at a place, as :func:`loads` does. Also returns where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, place)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value]
    # Most texts have fewer brackets, and are not looked through.
    if text.count("[", place, end) + text.count("{", place, end) > _MOST_NESTED:
        for _ in range(_MOST_NESTED):
            inner = [box.values() if isinstance(box, dict) else box for box in level]
            level = [one for box in inner for one in box if isinstance(one, dict | list)]
        if level:
            raise ValueError(f"it is nested deeper than {_MOST_NESTED} levels")
    return value, end


def dumps(value: Any, **options: Any) -> str:
    """Writes JSON with null for numbers that are not finite.

    If ``value`` is a dict, the number of these nulls is added under :data:`COUNT_KEY`.
    """
    with suppress(ValueError):  # much faster, if all numbers are finite
        return json.dumps(value, allow_nan=False, **options)
    found: list[float] = []
    strict = _strict(value, found)
    if found and isinstance(strict, dict):
        strict[COUNT_KEY] = len(found)
    return json.dumps(strict, allow_nan=False, **options)


def finite(value: Any) -> float | None:
    """Returns a value if it is a finite number, or else None. Files of earlier releases may hold NaN."""
    largest = sys.float_info.max  # integers may be larger
    return value if isinstance(value, float | int) and abs(value) <= largest else None


def _strict(value: Any, found: list[float]) -> Any:
    """Copies plain data with None for numbers that are not finite, and adds these numbers to ``found``."""
    if isinstance(value, dict):
        return {key: _strict(one, found) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one, found) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        found.append(value)
        return None
    return value


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.50} is no number of JSON that can be held")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite_float, parse_constant=_finite_float)
