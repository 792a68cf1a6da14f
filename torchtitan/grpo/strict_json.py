# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""JSON without ``NaN`` and ``Infinity``, which Python writes, and jq and browsers refuse."""

import json
import math
import sys
from typing import Any

COUNT_KEY = "nonfinite_values"
"""Key of an object that says how many of its numbers were not finite; it is absent if all were."""


def dumps(value: Any, **options: Any) -> str:
    """Numbers that are not finite are null; an object then counts them under :data:`COUNT_KEY`."""
    found: list[float] = []
    strict = _strict(value, found)
    if found and isinstance(strict, dict):
        strict[COUNT_KEY] = len(found)
    return json.dumps(strict, allow_nan=False, **options)


def finite(value: Any) -> float | None:
    """Returns a number that was read if it is finite: files of earlier releases hold NaN."""
    largest = sys.float_info.max  # integers may be larger
    return value if isinstance(value, float | int) and abs(value) <= largest else None


def _strict(value: Any, found: list[float]) -> Any:
    """Returns a copy of plain data without numbers that are not finite, which are added to ``found``."""
    if isinstance(value, dict):
        return {key: _strict(one, found) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one, found) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        found.append(value)
        return None
    return value
