# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts a launched server again when it ends, a few times.

    UP --ended--> DOWN --a pause--> STARTING --answers--> UP
                   ^ |                 |
                   | |                 +-- ended, or not up in time --> DOWN
                   | +-- no restart is left --> GONE

The server comes back on its port, so its URL stays, and with the weights of its model
directory: it gets work again when the weight pusher has pushed and attested newer ones.
"""

import asyncio
import logging

from torchtitan.grpo.config import Inference
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.local_servers import LaunchedServer, start_server, wait_until_up
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

# Shorter than the pause of a request before its second try, which then finds the server DOWN.
_LOOK_SECONDS = 0.05


class Supervisor:
    """Looks after one launched server; see the module's docstring.

    Args:
        server: Up, or ended since it was.
        client: Of the server.
        inference: For the number and spacing of restarts.

    Attributes:
        server: The process of now; None while there is none.
    """

    def __init__(
        self, server: LaunchedServer, client: InferenceClient, inference: Inference
    ) -> None:
        self.server: LaunchedServer | None = server
        self.client = client
        self._inference = inference
        self._last = server
        self._is_closed = False

    async def run(self, dispatcher: Dispatcher) -> str:
        """Keeps the server running; returns what to say of it once it is GONE.

        Args:
            dispatcher: Told at once when the server is DOWN.

        Raises:
            ValueError: ``inference.python`` cannot be run any more.
        """
        num_restarts, max_restarts = 0, self._inference.max_restarts
        end = await self._wait_for_end()
        while True:
            dispatcher.set_down(self.client.url, "its process has ended")
            self.server = None
            if num_restarts == max_restarts:
                return f"It was started again {num_restarts} times (inference.max_restarts). {end}"
            seconds = self._inference.restart_seconds * 2**num_restarts
            num_restarts += 1
            logger.error(
                "Restart %d of at most %d (inference.max_restarts) of %s follows in %g s. %s",
                num_restarts, max_restarts, self.client.url, seconds, end,
            )  # fmt: skip
            await asyncio.sleep(seconds)
            if self._is_closed:
                return end
            self._start()
            dispatcher.set_running(self.client.url)
            end = await self._wait_until_up() or await self._wait_for_end()

    def close(self) -> LaunchedServer | None:
        """Starts nothing any more; returns the server for the caller to stop, if there is one."""
        self._is_closed = True
        server, self.server = self.server, None
        return server

    def _start(self) -> None:
        # Not in another thread: the kernel ends children with the thread they are from.
        self._last = start_server(self._last.spec, self._last.log_file, keep_log=True)
        self.server = self._last

    async def _wait_until_up(self) -> str | None:
        """None once the server is up; else what to say of its end."""
        server, timeout_seconds = self._last, self._inference.startup_timeout_seconds
        try:
            await wait_until_up([self.client], [server], timeout_seconds)
        except (RuntimeError, TimeoutError) as error:
            # In a thread: one that is stuck takes a while to end.
            await asyncio.to_thread(server.stop)
            return str(error)
        logger.warning("%s is up again and waits for the newest weights.", server.url)
        return None

    async def _wait_for_end(self) -> str:
        server = self._last
        while server.process.poll() is None:
            await asyncio.sleep(_LOOK_SECONDS)
        # Its own workers may have stayed behind, with its port and its memory.
        server.stop(grace_seconds=0.0)
        return server.describe_end()
