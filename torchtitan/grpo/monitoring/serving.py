# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Serves the routes, on an event loop that exists already or on a thread of their own."""

import asyncio
import threading
from concurrent.futures import Future

from aiohttp import web

from torchtitan.grpo.monitoring.routes import Routes
from torchtitan.grpo.system.http_site import listen
from torchtitan.grpo.system.priority import yield_to_training

_START_SECONDS = 10.0
_SHUTDOWN_SECONDS = 0.3
_IDLE_SECONDS = 15.0
_MAX_CONNECTIONS = 128


class MonitorError(RuntimeError):
    """Raised if the address of a monitor cannot be used."""


class MonitorSite:
    """Serves the routes on the running event loop.

    Args:
        routes: The routes.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
    """

    def __init__(self, routes: Routes, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._listener: asyncio.Server | None = None
        self._runner = web.AppRunner(
            routes.app(),
            access_log=None,
            keepalive_timeout=_IDLE_SECONDS,
            shutdown_timeout=_SHUTDOWN_SECONDS,
        )

    async def start(self) -> tuple[str, int]:
        """Listens, and returns host and port.

        Raises:
            MonitorError: If the address cannot be used.
        """
        await self._runner.setup()
        try:
            self._listener = await listen(self._runner, self._host, self._port, _MAX_CONNECTIONS)
        except OSError as error:
            await self._runner.cleanup()
            raise MonitorError(
                f"/healthz and /metrics cannot be served on observe.monitor_host = {self._host}, port "
                f"{self._port}: {error}. Choose another observe.monitor_port (0 takes a free one), "
                "or set observe.monitor = false."
            ) from error
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Stops listening, and closes all connections."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()


class MonitorThread:
    """Serves the routes on a thread of its own, which yields to the training thread.

    Args:
        routes: The routes. Their functions are called on the thread.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
    """

    def __init__(self, routes: Routes, host: str, port: int) -> None:
        self._site_of = lambda: MonitorSite(routes, host, port)
        self._address: Future[tuple[str, int]] = Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> tuple[str, int]:
        """Starts the thread, and returns host and port.

        Raises:
            MonitorError: If the address cannot be used.
        """
        self._thread.start()
        return self._address.result(_START_SECONDS)

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Ends the thread. It is idempotent."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        yield_to_training()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        site = self._site_of()
        try:
            address = await site.start()
        except BaseException as error:  # the thread's boundary: raised where it was started
            self._address.set_exception(error)
            return
        self._address.set_result(address)
        await self._stop.wait()
        await site.close()
