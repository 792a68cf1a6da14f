# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The servers of a run: those named in ``inference.urls``, or those started here."""

import asyncio
import logging

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.factory import make_client
from torchtitan.grpo.inference.launch import (
    LaunchedServer,
    start_servers,
    stop_servers,
    wait_until_up,
)

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_CLOSE_SECONDS = 0.5
_STOP_GRACE_SECONDS = 1.5


class ServerFleet:
    """Clients of all servers, and the processes of those that were started here.

    :meth:`close` may be called at any time, also after a :meth:`start` that failed.
    """

    def __init__(self, config: RolloutProcessConfig) -> None:
        self._config = config
        self._launched: list[LaunchedServer] = []
        self.clients: list[InferenceClient] = []

    async def start(self) -> None:
        """Starts servers where ``inference.launch`` says so, and waits for all of them.

        Raises:
            ValueError: A URL is none, or the servers' interpreter cannot be run.
            RuntimeError: A server that was started has ended.
            TimeoutError: One is not up within ``inference.startup_timeout_seconds``.
        """
        inference = self._config.inference
        urls = inference.urls
        if inference.launch:
            # Not in another thread: the kernel ends children with the thread they are from.
            self._launched = start_servers(self._config)
            urls = [server.url for server in self._launched]
        if not urls:
            raise ValueError("inference.urls must name a server, unless inference.launch is true.")
        self.clients = [
            make_client(
                inference.kind,
                url,
                api_key=inference.api_key,
                admin_key=inference.admin_key,
                control_timeout_seconds=inference.control_timeout_seconds,
                request_timeout_seconds=self._config.rollout.request_timeout_seconds,
            )
            for url in urls
        ]
        await wait_until_up(self.clients, self._launched, inference.startup_timeout_seconds)

    async def watch(self) -> None:
        """Watches the servers that were started here; returns where there are none.

        Raises:
            RuntimeError: The last of them has ended. Nobody starts them again.
        """
        running = list(self._launched)
        while running:
            await asyncio.sleep(_WATCH_SECONDS)
            for server in [s for s in running if s.process.poll() is not None]:
                running.remove(server)
                message = (
                    f"The {server.kind} server {server.url} ended with exit status "
                    f"{server.process.returncode}. The end of its log "
                    f"{server.log_file}:\n{server.log_tail()}"
                )
                if not running:
                    raise RuntimeError(message)
                logger.error("%d servers are left. %s", len(running), message)

    async def close(self) -> None:
        """Closes the clients and ends the servers that were started here. Idempotent."""
        launched, self._launched = self._launched, []
        clients, self.clients = self.clients, []
        if clients:
            closing = [asyncio.create_task(client.close()) for client in clients]
            await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
        if launched:
            await asyncio.to_thread(stop_servers, launched, _STOP_GRACE_SECONDS)
