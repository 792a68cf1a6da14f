# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Serves ``/healthz`` and ``/metrics`` of the rollout process."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.monitoring.addresses import KEY_VARIABLE, remove_address, write_address
from torchtitan.grpo.monitoring.routes import Routes
from torchtitan.grpo.monitoring.serving import MonitorError, MonitorSite
from torchtitan.grpo.rollout.vital_signs import VitalSigns
from torchtitan.grpo.types import ServerInfo

logger = logging.getLogger(__name__)

_PROCESS, _SERVERS = "rollout", "servers"


class RolloutMonitor:
    """Serves the vital signs, and writes where they and the servers can be watched.

    A monitor that cannot be served, or a folder that cannot be written, ends nothing.

    Args:
        config: Settings of the rollout process.
        announce: Called with sentences that the user should read now.

    Attributes:
        signs: The vital signs.
    """

    def __init__(self, config: RolloutProcessConfig, announce: Callable[[str], None]) -> None:
        self._config, self._announce = config, announce
        self.signs = VitalSigns(config.stuck_seconds, config.inference.startup_timeout_seconds)
        self._site: MonitorSite | None = None

    async def start(self) -> None:
        """Begins to serve, unless ``observe.monitor`` is off."""
        config = self._config
        if not config.monitor_host:
            return
        key = os.environ.get(KEY_VARIABLE, "")
        routes = Routes(self.signs.health, self.signs.values, key)
        site = MonitorSite(routes, config.monitor_host, config.monitor_port)
        try:
            address = await site.start()
            self._site = site
            write_address(config.dump_folder, _PROCESS, [address])
        except (MonitorError, OSError) as error:
            self._announce(f"The rollout process is not monitored: {error}")
            return
        host, port = address
        logger.info("Serving http://%s:%d/healthz and /metrics", host, port)

    def tell_servers(self, servers: Sequence[ServerInfo]) -> None:
        """Writes the addresses of the servers, which serve ``/metrics`` themselves."""
        if self._site is None:
            return
        parts = [urlsplit(server.url) for server in servers]
        targets = [(p.hostname or "", p.port or 80) for p in parts]
        try:
            write_address(
                self._config.dump_folder, _SERVERS, targets, kind=self._config.inference.kind
            )
        except OSError as error:
            logger.error("The addresses of the servers could not be written: %s", error)

    async def close(self) -> None:
        """Ends the serving, and removes the addresses."""
        if self._site is None:
            return
        for process in (_PROCESS, _SERVERS):
            with suppress(OSError):
                remove_address(self._config.dump_folder, process)
        await self._site.close()
        self._site = None
