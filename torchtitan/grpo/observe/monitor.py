# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Serves ``/healthz`` and ``/metrics`` of rank 0."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from torchtitan.tools.logging import logger

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.monitoring.addresses import KEY_VARIABLE, remove_address, write_address
from torchtitan.grpo.monitoring.health import Pulse
from torchtitan.grpo.monitoring.routes import Routes
from torchtitan.grpo.monitoring.serving import MonitorThread

_PROCESS = "rank0"


class RankMonitor:
    """Serves what the training thread has left behind.

    The training thread assigns attributes and waits for nothing. The serving thread reads them.

    Args:
        config: Configuration of the run.

    Attributes:
        pulse: Phases and steps of this rank.
        latest: Metrics of the last step, and of the last evaluation.
        servers: Returns the state of each server, by URL.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self.pulse = Pulse(config.observe.stuck_seconds)
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
            lambda: self.pulse.health(self.servers()),
            lambda: {**self.latest, **self.pulse.values()},
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
