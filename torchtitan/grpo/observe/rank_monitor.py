# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Serves ``/healthz`` and ``/metrics`` of rank 0."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.system.monitoring.site import Health, MonitorSite, MonitorThread

_TIMES_LONGER = 3.0


class RankMonitor:
    """Serves the attributes that the training thread assigns, without waiting for anything."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self.phases = Phases(config.observe.stuck_seconds)
        self.latest: Mapping[str, float] = {}
        self.servers: Callable[[], Mapping[str, Mapping[str, str | int]]] = dict
        self._thread: MonitorThread | None = None

    def start(self) -> None:
        """Raises MonitorError if the address cannot be used."""
        observe = self._config.observe
        if not observe.monitor:
            return
        site = MonitorSite(
            lambda: self.phases.health(self.servers()),
            lambda: {**self.latest, **self.phases.metrics()},
            (observe.monitor_host, observe.monitor_port),
            self._config.job.dump_folder,
            "rank0",
        )
        self._thread = MonitorThread(site)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None


class Phases:
    """Phases of a training rank; any thread may read what the training thread assigns.

    The rank is stuck in a phase longer than ``stuck_seconds`` and than three times the longest such
    phase before: a run whose steps take an hour is not stuck in its second step.
    """

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_seconds, self._clock = stuck_seconds, clock
        self._phase, self._since = "starting", clock()
        self._longest: defaultdict[str, float] = defaultdict(float)
        self._completed: int | None = None
        self._completed_at = clock()

    def enter(self, phase: str) -> None:
        now, former = self._clock(), self._phase
        self._longest[former] = max(self._longest[former], now - self._since)
        self._phase, self._since = phase, now

    def complete(self, step: int) -> None:
        self._completed, self._completed_at = step, self._clock()

    def metrics(self) -> dict[str, float]:
        now = self._clock()
        return {
            "monitor/step": float(self._completed or 0),
            "monitor/since_step_seconds": now - self._completed_at,
            "monitor/phase_seconds": now - self._since,
        }

    def health(self, servers: Mapping[str, Any]) -> Health:
        """``servers`` holds the state of each server, by URL."""
        now = self._clock()
        phase, lasted = self._phase, now - self._since
        bound = max(self._stuck_seconds, _TIMES_LONGER * self._longest.get(phase, 0.0))
        problem = None
        if lasted > bound:
            problem = (
                f"The phase {phase!r} has lasted {lasted:.0f} s, more than {bound:.0f} s "
                "(observe.stuck_seconds)."
            )
        facts = {
            "phase": phase,
            "phase_seconds": round(lasted, 3),
            "step": self._completed,
            "seconds_since_step": round(now - self._completed_at, 3),
            "servers": dict(servers),
        }
        return Health(problem, facts)
