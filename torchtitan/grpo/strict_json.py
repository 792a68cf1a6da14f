# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""JSON in the strict sense, which has no numbers that are not finite.

Python would write ``NaN`` and ``Infinity``, which jq, browsers and databases refuse. Everything that the
project writes as JSON is written here.
"""

import json
import math
from typing import Any

COUNT_KEY = "nonfinite_values"
"""Key of an object that says how many of its numbers were not finite; it is absent if all were."""


def dumps(value: Any, **options: Any) -> str:
    """Returns a value as JSON, with null for each number that is not finite.

    An object then says under :data:`COUNT_KEY` how many these are. ``options`` are `json.dumps`'s.
    """
    found: list[float] = []
    strict = _strict(value, found)
    if found and isinstance(strict, dict):
        strict[COUNT_KEY] = len(found)
    return json.dumps(strict, allow_nan=False, **options)


def finite(value: Any) -> float | None:
    """Returns a number that was read if it is finite, else None.

    Files of earlier releases hold NaN and infinite numbers where there is null now.
    """
    return value if isinstance(value, float | int) and math.isfinite(value) else None


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
