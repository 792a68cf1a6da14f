# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks how busy a server says it is; each kind's `load.py` reads its server's answer.

A server with several engines counts as one: its requests are added up, and the use of its
fullest KV cache is taken.
"""

import math
from collections.abc import Sequence
from typing import Any

from torchtitan.grpo.inference.client import ServerError, ServerLoad

_MAX_VALUE = 1e9  # no server has this many requests


def checked_load(
    source: str, running: Sequence[float], waiting: Sequence[float], kv_use: Sequence[float]
) -> ServerLoad:
    """Returns the load of a server from the numbers of its engines.

    Args:
        source: URL and route, for the error message.
        running: Number of running requests of each engine.
        waiting: Number of waiting requests of each engine.
        kv_use: Used part of each engine's KV cache, in [0, 1].

    Raises:
        ServerError: If there is no number, or one is negative, not finite or implausibly large.
    """
    values = [*running, *waiting, *kv_use]
    if not values or not all(0 <= value < _MAX_VALUE for value in values):  # nor NaN
        raise ServerError(
            f"{source} must answer numbers in [0, {_MAX_VALUE:g}), got running requests "
            f"{running}, waiting requests {waiting} and use of the KV cache {kv_use}."
        )
    return ServerLoad(int(sum(running)), int(sum(waiting)), max(kv_use))


def to_number(value: Any) -> float:
    """Returns a JSON value or text as a number, or NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
