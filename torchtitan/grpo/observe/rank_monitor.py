# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Serves ``/healthz`` and ``/metrics`` of rank 0."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.monitoring.addresses import KEY_VARIABLE, remove_address, write_address
from torchtitan.grpo.monitoring.site import Health, MonitorThread, Routes
from torchtitan.grpo.system.logs import logger

_PROCESS = "rank0"
_TIMES_LONGER = 3.0


class RankMonitor:
    """Serves what the training thread has left behind.

    The training thread assigns attributes and waits for nothing. The serving thread reads them.

    Attributes:
        phases: Phases and steps of this rank.
        latest: Metrics of the last step, and of the last evaluation.
        servers: Returns the state of each server, by URL.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self.phases = Phases(config.observe.stuck_seconds)
        self.latest: Mapping[str, float] = {}
        self.servers: Callable[[], Mapping[str, Mapping[str, str | int]]] = dict
        self._thread: MonitorThread | None = None

    def start(self) -> None:
        """Begins to serve, unless ``observe.monitor`` is off. Called on rank 0.

        Raises:
            MonitorError: If the address cannot be used.
        """
        observe = self._config.observe
        if not observe.monitor:
            return
        routes = Routes(
            lambda: self.phases.health(self.servers()),
            lambda: {**self.latest, **self.phases.metrics()},
            os.environ.get(KEY_VARIABLE, ""),
        )
        self._thread = MonitorThread(routes, observe.monitor_host, observe.monitor_port)
        host, port = self._thread.start()
        logger.info("Serving http://%s:%d/healthz and /metrics", host, port)
        try:
            write_address(self._config.job.dump_folder, _PROCESS, [(host, port)])
        except OSError as error:  # such as a full disk, which need not end the run
            logger.error("The address of rank 0's monitor could not be written: %s", error)

    def close(self) -> None:
        """Ends the serving, and removes the address. It is idempotent."""
        if self._thread is None:
            return
        self._thread.close()
        self._thread = None
        with suppress(OSError):
            remove_address(self._config.job.dump_folder, _PROCESS)


class Phases:
    """Follows the phases of a training rank.

    The rank is stuck if its phase lasts longer than ``stuck_seconds`` and than three times the
    longest such phase before: a run whose steps take an hour is not stuck in its second step.

    The training thread only assigns attributes here. Any other thread may read them.
    """

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_seconds, self._clock = stuck_seconds, clock
        self._phase, self._since = "starting", clock()
        self._longest: defaultdict[str, float] = defaultdict(float)
        self._completed: int | None = None
        self._completed_at = clock()

    def enter(self, phase: str) -> None:
        """Records what the rank does from now on."""
        now = self._clock()
        former = self._phase
        self._longest[former] = max(self._longest[former], now - self._since)
        self._phase, self._since = phase, now

    def complete(self, step: int) -> None:
        """Records that a step has been completed."""
        self._completed, self._completed_at = step, self._clock()

    def metrics(self) -> dict[str, float]:
        """Returns the step and the times."""
        now = self._clock()
        return {
            "monitor/step": float(self._completed or 0),
            "monitor/since_step_seconds": now - self._completed_at,
            "monitor/phase_seconds": now - self._since,
        }

    def health(self, servers: Mapping[str, Any]) -> Health:
        """Returns the health of the rank. ``servers`` holds the state of each server, by URL."""
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
