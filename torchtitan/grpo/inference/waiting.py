# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Waits until servers are up."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.inference.join_check import WrongServer
from torchtitan.grpo.inference.local_servers import LaunchedServer

_POLL_SECONDS = 0.25
_SHOW_SECONDS = 1.0

Check = Callable[[InferenceClient], Awaitable[None]]
Show = Callable[[str, int, int], Awaitable[None]]
"""Shows a line about a wait, and how many of how many servers are up."""


async def wait_until_up(
    clients: Sequence[InferenceClient],
    servers: Sequence[LaunchedServer],
    timeout_seconds: float,
    *,
    check: Check | None = None,
    show: Show | None = None,
    kind: str = "inference",
    urls_key: str = "inference.urls or inference.urls_file",
) -> None:
    """Returns when every server is up and has passed the check.

    ``check`` is called with each server that is up, or that refuses the health request. If ``check`` raises
    :class:`WrongServer`, the other waits end. ``show`` is called every second until all are up. Raises
    RuntimeError, with the end of the log, if a launched server has ended, and TimeoutError if a server is
    not up in time.
    """
    launched = {server.url: server for server in servers}
    waits = [_Wait(c, launched.get(c.url), timeout_seconds, check, urls_key) for c in clients]
    running = [asyncio.create_task(wait.run()) for wait in waits]
    showing = [] if show is None else [asyncio.create_task(_show(waits, kind, show))]
    try:
        await asyncio.gather(*running)  # the first failure is raised, and ends the other waits
    finally:
        for task in (*running, *showing):
            task.cancel()
        await asyncio.gather(*running, *showing, return_exceptions=True)


async def _show(waits: Sequence["_Wait"], kind: str, show: Show) -> None:
    while missing := [wait for wait in waits if not wait.is_up]:
        done, first = len(waits) - len(missing), missing[0]
        line = f"waiting for {kind} servers: {done} of {len(waits)} ready"
        await show(f"{line}; {first.client.url}: {first.describe()}", done, len(waits))
        await asyncio.sleep(_SHOW_SECONDS)


_NO_ANSWER = "none yet"


@dataclass
class _Wait:
    client: InferenceClient
    server: LaunchedServer | None
    timeout_seconds: float
    check: Check | None
    urls_key: str
    last: str = _NO_ANSWER
    began: float = field(default_factory=time.monotonic)
    is_up: bool = False

    async def run(self) -> None:
        while True:
            asking = asyncio.create_task(self._is_up())
            try:
                while not asking.done():
                    await asyncio.wait([asking], timeout=_POLL_SECONDS)
                    self._look()
                if asking.result():
                    self.is_up = True
                    return
            finally:
                asking.cancel()
            if time.monotonic() - self.began >= self.timeout_seconds:
                raise self._timeout()
            await asyncio.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        """Raises RuntimeError if the server's process has ended."""
        if self.server is not None and self.server.process.poll() is not None:
            raise RuntimeError(
                f"A server must stay up, but it ended early. {self.server.describe_end()}"
            )

    async def _is_up(self) -> bool:
        remaining = self.timeout_seconds - (time.monotonic() - self.began)
        try:
            async with asyncio.timeout(max(remaining, 0.0)):
                await self._ask()
        except WrongServer:
            raise
        except (ServerError, TimeoutError) as error:
            if str(error):
                self.last = f"{type(error).__name__}: {error}"
            elif self.last == _NO_ANSWER:
                self.last = "none in time"
            return False
        return True

    async def _ask(self) -> None:
        try:
            await self.client.health()
        except RouteError as error:
            if self.check is None or not error.is_refusal:
                raise
            await self.check(self.client)  # names what answers in the server's place
            raise
        if self.check is not None:
            await self.check(self.client)

    def describe(self) -> str:
        """Returns the last line of a launched server's log, which says more than a refused connection."""
        return f"last answer: {self.last}" if self.server is None else self.server.last_line()

    def _timeout(self) -> TimeoutError:
        must = (
            f"The server {self.client.url} must be up within inference.startup_timeout_seconds "
            f"({self.timeout_seconds:g} s). Last answer: {self.last}."
        )
        if self.server is not None:
            return TimeoutError(
                f"{must} The run has started it, and it still runs. See what it waits for, or raise "
                f"inference.startup_timeout_seconds. {self.server.describe_log()}"
            )
        return TimeoutError(
            f"{must} Start the server first, correct its URL in {self.urls_key}, or raise "
            "inference.startup_timeout_seconds."
        )
