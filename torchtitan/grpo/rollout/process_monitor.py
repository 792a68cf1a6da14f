# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Health and metrics of the rollout process, served over HTTP by that process."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import numpy as np

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.session import RolloutSession
from torchtitan.grpo.system.monitoring.addresses import remove_address, write_address
from torchtitan.grpo.system.monitoring.site import Health, MonitorError, MonitorSite
from torchtitan.grpo.types import ServerInfo

_SERVERS = "servers"
_INTERVAL_SECONDS = 0.01
_WINDOW_SECONDS = 60.0


class RolloutMonitor:
    """Serves ``/healthz`` and ``/metrics``, and writes its address to a file. Its failure ends no run."""

    def __init__(self, config: RolloutProcessConfig, announce: Callable[[str], None]) -> None:
        self._config, self._announce = config, announce
        self.health = ProcessHealth(config.stuck_seconds, config.inference.startup_timeout_seconds)
        self._site: MonitorSite | None = None

    async def start(self) -> None:
        config, health = self._config, self.health
        if not config.monitor_host:
            return
        address = config.monitor_host, config.monitor_port
        site = MonitorSite(health.health, health.metrics, address, config.dump_folder, "rollout")
        try:
            await site.start()
        except MonitorError as error:
            self._announce(f"The rollout process is not monitored: {error}")
        else:
            self._site = site

    def tell_servers(self, servers: Sequence[ServerInfo]) -> None:
        """Writes the inference servers' addresses to a file. The servers serve ``/metrics`` themselves."""
        if self._site is None:
            return
        parts = [urlsplit(server.url) for server in servers]
        targets = [(p.hostname or "", p.port or 80) for p in parts]
        kind = self._config.inference.kind
        write_address(self._config.dump_folder, _SERVERS, targets, kind=kind)

    async def close(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            remove_address(self._config.dump_folder, _SERVERS)
            await site.close()


class ProcessHealth:
    """Follows whether the process makes progress.

    The process is stuck if, for longer than ``stuck_seconds``, it has not become ready, has had no
    server that takes work, or has finished no completion while rank 0 waits for a batch. A start
    counts as stuck only after ``startup_seconds``, the time that servers may take to start.
    """

    def __init__(
        self,
        stuck_seconds: float,
        startup_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stuck_seconds, self._startup_seconds = stuck_seconds, startup_seconds
        self._clock = clock
        self._began = self._had_server = self._progressed = clock()
        self._num_tokens = 0
        self._session: RolloutSession | None = None

    def begin(self, session: RolloutSession) -> None:
        self._session = session
        self._had_server = self._progressed = self._clock()

    def note(self) -> None:
        """Checks for progress since the last call. Must be called about once a second."""
        if self._session is None:
            return
        dispatcher, now = self._session.dispatcher, self._clock()
        if any(
            server.is_ready() or server.waits_for_devices for server in dispatcher.servers.values()
        ):
            self._had_server = now
        num_tokens = dispatcher.attempts.num_tokens
        if num_tokens != self._num_tokens or not self._session.producer.is_asked:
            self._num_tokens, self._progressed = num_tokens, now

    def health(self) -> Health:
        if self._session is None:
            lasted = self._clock() - self._began
            bound = max(self._stuck_seconds, self._startup_seconds)
            problem = f"It has been starting for {lasted:.0f} s." if lasted > bound else None
            return Health(problem, {"phase": "starting", "phase_seconds": round(lasted, 3)})
        self.note()
        now, dispatcher = self._clock(), self._session.dispatcher
        without, waiting = now - self._had_server, now - self._progressed
        problem = None
        if without > self._stuck_seconds:
            problem = f"No server has been able to take work for {without:.0f} s."
        elif waiting > self._stuck_seconds:
            problem = f"Rank 0 waits for a batch, and no completion has ended for {waiting:.0f} s."
        servers = {
            url: {
                "state": server.state,
                "version": server.version,
                "inflight_rollouts": server.load,
            }
            for url, server in dispatcher.servers.items()
        }
        is_asked = self._session.producer.is_asked
        facts = {
            "phase": "generating for a waiting trainer" if is_asked else "generating ahead",
            "seconds_without_server": round(without, 3),
            "seconds_without_completion": round(waiting, 3),
            "servers": servers,
        }
        return Health(problem, facts)

    def metrics(self) -> dict[str, float]:
        if self._session is None:
            return {}
        session = self._session
        dispatcher = session.dispatcher
        is_ready = [server.is_ready() for server in dispatcher.servers.values()]
        return dispatcher.metrics() | {
            "monitor/tokens_total": float(dispatcher.attempts.num_tokens),
            "monitor/failed_requests_total": float(dispatcher.attempts.num_failed),
            "monitor/dropped_total": float(sum(session.drops.counts.values())),
            "monitor/ready_servers": float(sum(is_ready)),
            "rollout/inflight_rollouts": float(dispatcher.in_flight),
            "rollout/buffer_groups": float(len(session.producer.finished)),
        }


class LoopLag:
    """Measures the delay of the event loop, by which answers and commands are delayed.

    A task sleeps for a short interval and records how late it wakes up. While the loop is blocked, the
    task misses measurements that would also have been late. These are added when it wakes up, each one
    interval shorter than the one before::

        interval 10 ms, woken 35 ms late  ->  35, 25, 15, 5 ms

    Percentiles cover the last minute, and the maximum the time since it was last read.
    """

    def __init__(
        self, interval_seconds: float = _INTERVAL_SECONDS, window_seconds: float = _WINDOW_SECONDS
    ) -> None:
        self._interval = interval_seconds
        self._lags: deque[float] = deque(maxlen=round(window_seconds / interval_seconds))
        self._longest = 0.0

    async def run(self) -> None:
        # One measurement takes about 10 microseconds.
        while True:
            due = time.monotonic() + self._interval
            await asyncio.sleep(self._interval)
            self.add(time.monotonic() - due)

    def add(self, late_seconds: float) -> None:
        """Adds a measured delay, and the measurements that were missed because of it."""
        late = max(late_seconds, 0.0)
        self._longest = max(self._longest, late)
        # Measurements beyond the size of the window would be dropped anyway.
        num_missed = min(int(late / self._interval), self._lags.maxlen or 0)
        self._lags.extend(late - missed * self._interval for missed in range(num_missed + 1))

    def take_metrics(self) -> dict[str, float]:
        longest, self._longest = self._longest, 0.0
        if not self._lags:
            return {}
        median, high = np.percentile(self._lags, (50, 99))
        return {
            "rollout/loop_lag_p50_ms": float(median) * 1e3,
            "rollout/loop_lag_p99_ms": float(high) * 1e3,
            "rollout/loop_lag_max_ms": longest * 1e3,
        }
