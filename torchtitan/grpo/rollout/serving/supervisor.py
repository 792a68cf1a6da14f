# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Restarts a launched server if it ends or no longer listens, a limited number of times in a row.

::

    UP --ended--> DOWN --a pause--> STARTING --answers--> UP
                   ^ |                 |
                   | |                 +-- ended, or not up in time --> DOWN
                   | +-- no restart is left --> GONE

The restarted server keeps its port and loads the weights of its model directory. It gets
requests again once newer weights were pushed and attested. If it has been up for ten minutes before
it ends again, restarts count from 0. The run ends if a server ends before any server received weights.

A server whose engine has died may hang forever while it shuts down, as vLLM does. Such a server
has already closed its socket, and the supervisor ends it. A frozen or busy server is left alone.

A lent server is only started while its devices are lent. If the devices are needed before the server
is up, or if the server does not fall asleep, it is ended and DOWN.
"""

import asyncio
import logging
import time

from torchtitan.grpo.config import Inference
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.local_servers import LaunchedServer, start_server
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.system.waits import Backoff

logger = logging.getLogger(__name__)

# This is shorter than the pause before a request is retried, so that the retry finds the server DOWN.
_LOOK_SECONDS = 0.05
_LISTEN_SECONDS = 2.0  # between two looks at a server's socket
# This is longer than a server needs to end in the normal way after it has closed its socket.
_DEAF_SECONDS = 10.0
_PROVEN_SECONDS = 600.0  # a server that was up for so long has started well


class Supervisor:
    """Supervises one launched server that has started well. ``server`` is its current process, if any."""

    def __init__(
        self, server: LaunchedServer, client: InferenceClient, inference: Inference
    ) -> None:
        self.server: LaunchedServer | None = server
        self.client = client
        self._inference = inference
        self._last = server
        self._is_closed = self._is_ended = self._is_starting = False
        self._is_wanted = asyncio.Event()
        self._is_wanted.set()

    async def run(self, dispatcher: Dispatcher) -> str:
        """Keeps the server running. Returns a description of its end once it is GONE.

        Raises ``RuntimeError`` if the server ends before any server of the run has taken weights.
        """
        max_restarts = self._inference.max_restarts
        backoff = Backoff(self._inference.restart_seconds, self._inference.max_restart_seconds)
        end = await self._wait_for_end()
        was_used = any(each.attested is not None for each in dispatcher.servers.values())
        if not (was_used or self._is_ended):
            raise RuntimeError(f"A server must stay up, but it ended before the run used it. {end}")
        while True:
            dispatcher.set_down(self.client.url, "its process has ended")
            self.server = None
            if self._is_ended:
                self._is_ended = False  # on purpose, which is no failure
            elif backoff.num_failures == max_restarts:
                return f"It was restarted {max_restarts} times (inference.max_restarts). {end}"
            else:
                seconds = backoff.seconds_after_failure()
                logger.error(
                    "Restart %d of at most %d (inference.max_restarts) of %s follows in %g s. %s",
                    backoff.num_failures, max_restarts, self.client.url, seconds, end,
                )  # fmt: skip
                await asyncio.sleep(seconds)
            await self._is_wanted.wait()
            if self._is_closed:
                return end
            self._start()
            self._is_starting = True
            dispatcher.set_running(self.client.url)
            end = await self._wait_until_up()
            self._is_starting = False
            if end is None:
                up_since = time.monotonic()
                end = await self._wait_for_end()
                if time.monotonic() - up_since >= _PROVEN_SECONDS:
                    backoff.reset()

    @property
    def is_up(self) -> bool:
        server = self.server
        return server is not None and not self._is_starting and server.process.poll() is None

    @property
    def is_lent(self) -> bool:
        return self._last.spec.is_lent

    def set_wanted(self, is_wanted: bool) -> None:
        (self._is_wanted.set if is_wanted else self._is_wanted.clear)()

    async def end(self) -> bool:
        """Ends the server's process, which :meth:`run` starts again once the server is wanted.

        Returns whether the server was up.
        """
        server, was_up = self.server, not self._is_starting
        if server is None or server.process.poll() is not None:
            return False
        self._is_ended = True
        await asyncio.to_thread(server.stop, grace_seconds=0.0)
        return was_up

    def close(self) -> LaunchedServer | None:
        """Prevents further restarts. The caller must stop the server that is returned, if any."""
        self._is_closed = True
        server, self.server = self.server, None
        return server

    def _start(self) -> None:
        # A thread must not do this: the kernel ends a child together with the thread that started it.
        self._last = start_server(self._last.spec, self._last.log_file, keep_log=True)
        self.server = self._last

    async def _wait_until_up(self) -> str | None:
        """Returns ``None`` once the server is up, or a description of its end."""
        server, timeout_seconds = self._last, self._inference.startup_timeout_seconds
        try:
            await wait_until_up([self.client], [server], timeout_seconds)
        except (RuntimeError, TimeoutError) as error:
            # A thread stops the server, because a hung server takes some time to stop.
            await asyncio.to_thread(server.stop)
            return str(error)
        await asyncio.to_thread(server.note_shared_memory)
        logger.warning("Server %s is up again and waits for the newest weights.", server.url)
        return None

    async def _wait_for_end(self) -> str:
        server = self._last
        deaf = asyncio.create_task(_until_deaf(server))
        try:
            while server.process.poll() is None and not deaf.done():
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            deaf.cancel()
        end = ""
        if server.process.poll() is None:
            end = f"It was stopped, because it had not listened for {_DEAF_SECONDS:g} s. "
        # The server's own workers may still be running and may hold its port and its memory.
        await asyncio.to_thread(server.stop, grace_seconds=0.0)
        return end + server.describe_end()


async def _until_deaf(server: LaunchedServer) -> None:
    """Returns once every connection to the server was refused over ``_DEAF_SECONDS``."""
    # It is counted from the first refusal: time in which this process itself stood still says nothing.
    refused_at: float | None = None
    while True:
        try:
            async with asyncio.timeout(_LISTEN_SECONDS):
                _, writer = await asyncio.open_connection(server.spec.host, server.spec.port)
            writer.close()
            refused_at = None
        except ConnectionRefusedError:
            now = time.monotonic()
            refused_at = now if refused_at is None else refused_at
            if now - refused_at >= _DEAF_SECONDS:
                return
        except (OSError, TimeoutError):  # a busy server may fail to accept a connection
            refused_at = None
        await asyncio.sleep(_LISTEN_SECONDS)
