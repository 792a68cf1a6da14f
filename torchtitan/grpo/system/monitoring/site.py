# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Serves ``/healthz`` and Prometheus' ``/metrics`` of one process.

Each metric's key becomes a name: ``weight_sync/push_seconds`` is ``grpo_weight_sync_push_seconds``. The
part of a key that tells servers apart becomes a label, so that a dashboard need not know the servers::

    weight_sync/server0/lag             grpo_weight_sync_server_lag{server="0"}
    servers/10.0.0.7:8000/running       grpo_servers_running{server="10.0.0.7:8000"}
"""

import asyncio
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.http_site import HttpSite, answered
from torchtitan.grpo.system.monitoring.addresses import KEY_VARIABLE, remove_address, write_address
from torchtitan.grpo.system.process_tuning import yield_to_training

logger = logging.getLogger(__name__)

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NUMBERED = re.compile(r"(.*/server)(\d+)/(.+)")
_ADDRESSED = re.compile(r"(servers)/([^/]+)/(.+)")

_START_SECONDS = 10.0
_IDLE_SECONDS = 15.0
_MAX_CONNECTIONS = 128


class MonitorError(RunError):
    """The monitor cannot listen at its address."""


@dataclass(frozen=True)
class Health:
    """The answer to ``/healthz``: why a process is stuck (None if it is not), and facts as plain data."""

    problem: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)


def healthz(health: Health, *, is_allowed: bool) -> web.Response:
    """Answers 200 if the process is well, else 503. Only an allowed client gets the problem and the facts."""
    is_well = health.problem is None
    status = 200 if is_well else 503
    body: dict[str, Any] = {"status": "ok" if is_well else "stuck"}
    if is_allowed and not is_well:
        body["problem"] = health.problem
    if is_allowed:
        body |= health.facts
    return web.json_response(body, status=status, dumps=strict_json.dumps)


def metrics(values: Mapping[str, float]) -> web.Response:
    return web.Response(body=exposition(values), headers={"Content-Type": _CONTENT_TYPE})


def exposition(values: Mapping[str, float]) -> bytes:
    """Returns metrics in Prometheus' text format, with memory, files and CPU time of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values(values))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def prometheus_name(key: str) -> tuple[str, str | None]:
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


class MonitorSite:
    """Serves health and metrics of a process on the running event loop. Port 0 takes a free port.

    ``health`` and ``values`` are called on this loop. If the environment variable ``KEY_VARIABLE`` is set,
    metrics and details of the health are only for clients that send this key.
    """

    def __init__(
        self,
        health: Callable[[], Health],
        values: Callable[[], Mapping[str, float]],
        address: tuple[str, int],
        dump_folder: str,
        process: str,
    ) -> None:
        self._health, self._values = health, values
        self._host, self._port = address
        self._dump_folder, self._process = dump_folder, process
        self._key = os.environ.get(KEY_VARIABLE, "")
        app = web.Application(middlewares=[answered])
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        self._site = HttpSite(app, keepalive_timeout=_IDLE_SECONDS)

    async def start(self) -> tuple[str, int]:
        """Starts to listen and returns host and port, or raises :class:`MonitorError`."""
        try:
            host, port = await self._site.start(self._host, self._port, _MAX_CONNECTIONS)
        except OSError as error:
            await self._site.close()
            raise MonitorError(
                f"/healthz and /metrics cannot be served on observe.monitor_host = {self._host}, port "
                f"{self._port}: {error}. Choose another observe.monitor_port (0 takes a free one), "
                "or set observe.monitor = false."
            ) from error
        logger.info("Serving http://%s:%d/healthz and /metrics", host, port)
        write_address(self._dump_folder, self._process, [(host, port)])
        return host, port

    async def close(self) -> None:
        remove_address(self._dump_folder, self._process)
        await self._site.close()

    def _is_allowed(self, http: web.Request) -> bool:
        if not self._key:
            return True
        scheme, _, token = http.headers.get("Authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        return is_bearer and secrets.compare_digest(token.encode(), self._key.encode())

    async def _healthz(self, http: web.Request) -> web.Response:
        return healthz(self._health(), is_allowed=self._is_allowed(http))

    async def _metrics(self, http: web.Request) -> web.Response:
        if not self._is_allowed(http):
            message = f"Send 'Authorization: Bearer KEY', with the key of {KEY_VARIABLE}.\n"
            return web.Response(status=401, text=message)
        return metrics(self._values())


class MonitorThread:
    """Serves a site on a thread of its own, which has a lower priority than the training thread."""

    def __init__(self, site: MonitorSite) -> None:
        self._site = site
        self._address: Future[tuple[str, int]] = Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> tuple[str, int]:
        """Starts the thread and returns host and port, or raises :class:`MonitorError`."""
        self._thread.start()
        return self._address.result(_START_SECONDS)

    def close(self, timeout_seconds: float = 2.0) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        yield_to_training()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            address = await self._site.start()
        except BaseException as error:  # the thread's boundary: raised where it was started
            self._address.set_exception(error)
            return
        self._address.set_result(address)
        await self._stop.wait()
        await self._site.close()
