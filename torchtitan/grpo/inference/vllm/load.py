# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The load of a vLLM server, read from its Prometheus metrics.

The route needs no server flag, and no other key than generation.
"""

import re
from typing import Any

from torchtitan.grpo.inference.client import ServerError, ServerLoad
from torchtitan.grpo.inference.http import excerpt
from torchtitan.grpo.inference.loads import checked_load, to_number

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USE = "vllm:kv_cache_usage_perc"
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def parse_metrics(source: str, body: Any) -> ServerLoad:
    """Returns the load from the body of ``/metrics``, in Prometheus' text format.

    Raises:
        ServerError: If a metric is missing. A server that was started with
            ``--disable-log-stats`` reports none of them.
    """
    samples: dict[str, list[float]] = {_RUNNING: [], _WAITING: [], _KV_USE: []}
    for name, value in _SAMPLE.findall(body if isinstance(body, str) else ""):
        if name in samples:
            samples[name].append(to_number(value))
    missing = [name for name, values in samples.items() if not values]
    if missing:
        raise ServerError(
            f"{source} must hold {', '.join(missing)}, got {excerpt(body)}. Was the server "
            "started with --disable-log-stats?"
        )
    return checked_load(source, samples[_RUNNING], samples[_WAITING], samples[_KV_USE])
