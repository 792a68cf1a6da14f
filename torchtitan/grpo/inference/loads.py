# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How busy a server says it is, read from what each kind answers.

vLLM tells it among its Prometheus metrics, SGLang and the embedded server at ``/v1/loads``.
Both need no flag and no key beyond those of generation. A server of several engines is
counted as one: requests are added up, and its fullest cache is its cache.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from torchtitan.grpo.inference.client import ServerError, ServerLoad
from torchtitan.grpo.inference.http import excerpt

_VLLM_RUNNING = "vllm:num_requests_running"
_VLLM_WAITING = "vllm:num_requests_waiting"
_VLLM_KV_USE = "vllm:kv_cache_usage_perc"
_UNBELIEVABLE = 1e9  # requests on one server
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def load_of_metrics(source: str, body: Any) -> ServerLoad:
    """The load in vLLM's ``/metrics``, in Prometheus' text format.

    Raises:
        ServerError: Something is missing; a server started with ``--disable-log-stats`` has
            no metrics of its own.
    """
    samples: dict[str, list[float]] = {_VLLM_RUNNING: [], _VLLM_WAITING: [], _VLLM_KV_USE: []}
    for name, value in _SAMPLE.findall(body if isinstance(body, str) else ""):
        if name in samples:
            samples[name].append(_number(value))
    missing = [name for name, values in samples.items() if not values]
    if missing:
        raise ServerError(
            f"{source} must hold {', '.join(missing)}, got {excerpt(body)}. Was the server "
            "started with --disable-log-stats?"
        )
    return _load(source, samples[_VLLM_RUNNING], samples[_VLLM_WAITING], samples[_VLLM_KV_USE])


def load_of_ranks(source: str, body: Any) -> ServerLoad:
    """The load in the answer of SGLang's ``/v1/loads``, with one entry for each rank.

    Raises:
        ServerError: Something is missing, or no rank has said anything yet.
    """
    try:
        ranks = body["loads"]
        return _load(
            source,
            [_number(rank["num_running_reqs"]) for rank in ranks],
            [_number(rank["num_waiting_reqs"]) for rank in ranks],
            [_number(rank["token_usage"]) for rank in ranks],
        )
    except (KeyError, TypeError) as error:
        raise ServerError(
            f"{source} must answer loads with num_running_reqs, num_waiting_reqs and token_usage "
            f"({type(error).__name__}: {error}), got {excerpt(body)}"
        ) from error


def _load(
    source: str, running: Sequence[float], waiting: Sequence[float], kv_use: Sequence[float]
) -> ServerLoad:
    values = [*running, *waiting, *kv_use]
    if not values or not all(0 <= value < _UNBELIEVABLE for value in values):  # nor NaN
        raise ServerError(
            f"{source} must answer numbers that are not negative, nor beyond {_UNBELIEVABLE:g}, "
            f"got running {running}, waiting {waiting} and use of the cache {kv_use}."
        )
    return ServerLoad(int(sum(running)), int(sum(waiting)), max(kv_use))


def _number(value: Any) -> float:
    """A number from JSON or text; not a number where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
