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
from torchtitan.grpo.system.waits import Reminders

_POLL_SECONDS = 0.25

Check = Callable[[InferenceClient], Awaitable[None]]
Tell = Callable[[str], object]


async def wait_until_up(
    clients: Sequence[InferenceClient],
    servers: Sequence[LaunchedServer],
    timeout_seconds: float,
    *,
    check: Check | None = None,
    tell: Tell | None = None,
    kind: str = "inference",
    urls_key: str = "inference.urls or inference.urls_file",
) -> None:
    """Returns when every server is up and has passed the check.

    ``check`` is called with each server that is up, or that refuses the health request. If ``check`` raises
    :class:`WrongServer`, the other waits end. ``tell`` gets messages about each missing server, at growing
    intervals. Raises RuntimeError, with the end of the log, if a launched server has ended, and
    TimeoutError if a server is not up in time.
    """
    launched = {server.url: server for server in servers}
    waits = [
        asyncio.create_task(
            _Wait(c, launched.get(c.url), timeout_seconds, check, tell, kind, urls_key).run()
        )
        for c in clients
    ]
    try:
        await asyncio.gather(*waits)  # the first failure is raised, and ends the other waits
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


_NO_ANSWER = "none yet"


@dataclass
class _Wait:
    client: InferenceClient
    server: LaunchedServer | None
    timeout_seconds: float
    check: Check | None
    tell: Tell | None
    kind: str
    urls_key: str
    last: str = _NO_ANSWER
    began: float = field(default_factory=time.monotonic)
    reminders: Reminders = field(default_factory=Reminders)

    async def run(self) -> None:
        while True:
            asking = asyncio.create_task(self._is_up())
            try:
                while not asking.done():
                    await asyncio.wait([asking], timeout=_POLL_SECONDS)
                    self._look()
                if asking.result():
                    return
            finally:
                asking.cancel()
            if time.monotonic() - self.began >= self.timeout_seconds:
                raise self._timeout()
            await asyncio.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        """Raises RuntimeError if the server's process has ended. Otherwise sends a reminder when one is due."""
        if self.server is not None and self.server.process.poll() is not None:
            raise RuntimeError(
                f"A server must stay up, but it ended early. {self.server.describe_end()}"
            )
        waited = time.monotonic() - self.began
        is_late = waited >= self.timeout_seconds
        if self.tell is not None and not is_late and self.reminders.is_due(waited):
            self.tell(self._describe(waited))

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

    def _describe(self, waited: float) -> str:
        text = (
            f"The {self.kind} server {self.client.url} is not up yet after {waited:.0f} s (at most "
            f"{self.timeout_seconds:g} s, inference.startup_timeout_seconds)."
        )
        if self.server is None:
            return f"{text} Last answer: {self.last}"
        # It was started here and has not ended: what it does now says more than a refused connection.
        return f"{text} The last line of {self.server.log_file}: {self.server.last_line()}"

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
