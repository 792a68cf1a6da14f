# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Metrics in the text format of Prometheus.

The keys of metrics become names: ``weight_sync/push_seconds`` is ``grpo_weight_sync_push_seconds``.
The part of a key that tells servers apart becomes a label, so that a dashboard need not know them::

    weight_sync/server0/lag             grpo_weight_sync_server_lag{server="0"}
    servers/10.0.0.7:8000/running       grpo_servers_running{server="10.0.0.7:8000"}
"""

import re
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NUMBERED = re.compile(r"(.*/server)(\d+)/(.+)")
_ADDRESSED = re.compile(r"(servers)/([^/]+)/(.+)")


def exposition(values: Mapping[str, float]) -> bytes:
    """Returns metrics as text, with memory, file descriptors and processor time of this process.

    Args:
        values: Metrics by key, as in docs/metrics.md.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values(values))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def prometheus_name(key: str) -> tuple[str, str | None]:
    """Returns the name of a metric, and the server that it belongs to."""
    server = None
    if (match := _NUMBERED.fullmatch(key) or _ADDRESSED.fullmatch(key)) is not None:
        before, server, after = match.groups()
        key = f"{before}/{after}"
    return "grpo_" + re.sub(r"[^a-zA-Z0-9]+", "_", key).strip("_"), server


class _Values(Collector):
    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)

    def collect(self) -> Iterable[Metric]:
        families: dict[tuple[str, bool], GaugeMetricFamily] = {}
        for key, value in self._values.items():
            name, server = prometheus_name(key)
            family = families.setdefault(
                (name, server is None),
                GaugeMetricFamily(
                    name, "See docs/metrics.md.", labels=[] if server is None else ["server"]
                ),
            )
            family.add_metric([] if server is None else [server], value)
        return families.values()
