# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sends prompts to servers and carries their failures.

A server gets work only while the weight pusher has attested which version it serves::

    WAITING --version served--> READY --lost, or caught with old weights--> WAITING
       |  ^                       |
       v  +---- runs again ----+  v
       +----- ended ---------> DOWN          either one --removed--> forgotten

All rollouts of a group start on one server, which then computes the prompt once. What a
server was writing when it left READY is written by another, or by the same one once it is
READY again: from the beginning, and never under weights older than it was first given to.

A server names new weights as soon as it has them, a little before they are attested. What
was written under them is held back until then: if they turn out to be wrong, it is lost
with the server.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.rollout.requests import Sampling, check_generation
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 5.0
_CLOSE_SECONDS = 0.7
# How often a completion that no server can take looks for one.
_LOOK_SECONDS = 0.05


class ServersFailing(RuntimeError):
    """Too many completions in a row failed on the servers: the run must stop."""


class _GivenBack(ServerError):
    """The server left READY while it wrote: no sign that requests fail on it."""


@dataclass(eq=False)
class Server:
    """One server, as dispatch sees it.

    Attributes:
        client: For generation.
        version: What it serves, attested; None while it is not READY.
        is_down: Its process is known to have ended.
        load: Completions in flight on it.
        requests: Until the server has answered, or was told that nobody waits any more.
    """

    client: InferenceClient
    version: int | None = None
    is_down: bool = False
    load: int = 0
    requests: set[asyncio.Task[Generation]] = field(default_factory=set)
    retry_at: float = 0.0
    last_failure_at: float = 0.0
    failures_in_a_row: int = 0
    _left: asyncio.Future[None] | None = None
    _attested: asyncio.Future[None] | None = None

    @property
    def url(self) -> str:
        return self.client.url

    def is_ready(self) -> bool:
        """Attested, and not in the pause after a failure."""
        return self.version is not None and time.monotonic() >= self.retry_at

    def left(self) -> asyncio.Future[None]:
        """Done once the server leaves READY."""
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
        return self._left

    def attest(self, version: int) -> None:
        """It serves ``version``, and is READY."""
        self.version = version
        self.retry_at = 0.0
        former, self._attested = self._attested, None
        if former is not None:
            former.set_result(None)

    def next_attestation(self) -> asyncio.Future[None]:
        """Done once a further version was attested."""
        if self._attested is None:
            self._attested = asyncio.get_running_loop().create_future()
        return self._attested

    def leave(self) -> None:
        """Leaves READY. Those who wait for a request are told at once: to cancel it takes as
        long as the server takes to answer."""
        self.version = None
        left, self._left = self._left, None
        if left is not None:
            left.set_result(None)
        for request in list(self.requests):
            request.cancel()

    def start_request(self, request: asyncio.Task[Generation]) -> None:
        self.requests.add(request)
        request.add_done_callback(self._end_request)

    def _end_request(self, request: asyncio.Task[Generation]) -> None:
        self.requests.discard(request)
        if not request.cancelled():
            request.exception()  # nobody may be waiting for it any more


@dataclass(eq=False)
class _Completion:
    """One completion, from submission to its end; ``floor`` is the oldest version it takes."""

    prompt: Prompt
    sampling: Sampling
    floor: int
    server: Server


class Dispatcher:
    """All servers, and the completions in flight on them.

    Args:
        clients: One for each server.
        vocab_size: Sampled token ids must be below it.
        request_timeout_seconds: ``rollout.request_timeout_seconds``.
        max_consecutive_failures: ``rollout.max_consecutive_failures``.

    Attributes:
        servers: By URL.
        in_flight: Completions submitted and not ended, over all servers.
        listeners: Called when a server may have become free or ready.
    """

    def __init__(
        self,
        clients: Sequence[InferenceClient],
        *,
        vocab_size: int,
        request_timeout_seconds: float,
        max_consecutive_failures: int,
    ) -> None:
        self.servers = {client.url: Server(client) for client in clients}
        self.in_flight = 0
        self.listeners: list[Callable[[], None]] = []
        self._vocab_size = vocab_size
        self._request_timeout = request_timeout_seconds
        self._max_consecutive_failures = max_consecutive_failures
        self._consecutive_failures = 0
        self._is_closed = False
        # Ids of other runs on the same server must not collide with ours.
        self._run_id = uuid.uuid4().hex[:12]
        self._counter = itertools.count()
        self.num_failed_requests = 0
        self.num_tokens = 0
        self.last_error = ""

    def add(self, client: InferenceClient) -> None:
        """One more server, WAITING."""
        assert client.url not in self.servers, f"{client.url} is a server already"
        self.servers[client.url] = Server(client)

    def remove(self, url: str) -> list[asyncio.Task[Generation]]:
        """Forgets a server. What it had is given back at once.

        Returns:
            Requests that it is still being told of; close its client after them.
        """
        server = self.servers.pop(url)
        server.leave()
        self._changed()
        return list(server.requests)

    def set_version(self, url: str, version: int) -> None:
        """The server at ``url`` serves ``version``, attested: it may get work.

        News of a server that was removed, or has ended, since are too late to matter.
        """
        server = self.servers.get(url)
        if server is None or server.is_down:
            return
        server.attest(version)
        self._changed()

    def set_lost(self, url: str, reason: str) -> None:
        """The server at ``url`` gets no more work, and what it had is given back."""
        server = self.servers.get(url)
        if server is None:
            return
        logger.warning("Server %s gets no work until it is synchronised again: %s", url, reason)
        self.last_error = f"{url}: {reason}"
        server.leave()
        self._changed()

    def set_down(self, url: str, reason: str) -> None:
        """The process of the server at ``url`` has ended: lost until :meth:`set_running`."""
        if url in self.servers:
            self.servers[url].is_down = True
        self.set_lost(url, reason)

    def set_running(self, url: str) -> None:
        """The server at ``url`` was started again, and is WAITING."""
        if url in self.servers:
            self.servers[url].is_down = False

    def choose(self, usable: Callable[[int], bool]) -> Server | None:
        """The least loaded ready server whose version is ``usable``, if there is one."""
        ready = [
            server
            for server in self.servers.values()
            if server.is_ready() and server.version is not None and usable(server.version)
        ]
        return min(ready, key=lambda server: server.load, default=None)

    def submit(
        self, prompt: Prompt, server: Server, sampling: Sampling
    ) -> asyncio.Task[Generation]:
        """Starts one completion on a ready ``server``; it is in flight from now on.

        A failed request is sent once more, one that was given back as often as it takes: to a
        ready server whose weights are not older than those of the first, as soon as there is one.

        Returns:
            A task that raises :class:`ServerError` where both tries failed, or where no
            server could take it within ``rollout.request_timeout_seconds``, and
            :class:`ServersFailing` where ``rollout.max_consecutive_failures`` was reached.
        """
        assert server.version is not None, f"{server.url} is not ready"
        completion = _Completion(prompt, sampling, server.version, server)
        server.load += 1
        self.in_flight += 1
        task = asyncio.create_task(self._complete(completion))
        task.add_done_callback(lambda _: self._release(completion))
        return task

    async def close(self) -> None:
        """Cancels what is in flight, so that the servers are told. Bounded in time."""
        self._is_closed = True
        requests = [task for server in self.servers.values() for task in server.requests]
        for server in self.servers.values():
            server.leave()
        if requests:
            await asyncio.wait(requests, timeout=_CLOSE_SECONDS)

    def _release(self, completion: _Completion) -> None:
        completion.server.load -= 1
        self.in_flight -= 1
        self._changed()

    def _changed(self) -> None:
        for listener in self.listeners:
            listener()

    async def _complete(self, completion: _Completion) -> Generation:
        num_failures = 0
        while True:
            request_id = f"{self._run_id}-{completion.prompt.index}-{next(self._counter)}-"
            request = completion.sampling.request(request_id, completion.prompt)
            try:
                return await self._attempt(completion.server, request)
            except ServerError as error:
                num_failures += not isinstance(error, _GivenBack)
                if num_failures == _ATTEMPTS:
                    raise
                server = await self._next_server(completion.floor, error)
            completion.server.load -= 1
            server.load += 1
            completion.server = server

    async def _attempt(self, server: Server, request: GenerateRequest) -> Generation:
        started_at, attested = time.monotonic(), server.version
        if attested is None:
            raise _GivenBack(f"{server.url} was lost before it was sent a request")
        task = asyncio.create_task(self._request(server, request))
        server.start_request(task)
        left = server.left()
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()  # the server is told
            raise
        if left.done() and (not task.done() or task.cancelled() or task.exception() is not None):
            # Whoever reported the loss handles it.
            self.num_failed_requests += 1
            raise _GivenBack(f"{server.url} was lost while it wrote a completion")
        try:
            generation = task.result()
        except ServerError as error:
            self._record_failure(server, started_at, error)
            raise
        self._consecutive_failures = 0
        server.failures_in_a_row = 0
        newest = max(segment.version for segment in generation.segments)
        if newest > attested:
            await self._until_attested(server, newest, left)
        self.num_tokens += len(generation.token_ids)
        oldest = min(segment.version for segment in generation.segments)
        if server.version is not None and oldest < attested:
            # It was restarted: no more work until its weights are attested again.
            self.set_lost(server.url, f"it answered with version {oldest}, not {attested}")
        return generation

    async def _until_attested(
        self, server: Server, newest: int, left: asyncio.Future[None]
    ) -> None:
        """Returns when ``newest``, which the server names, was attested.

        Raises:
            _GivenBack: The server left READY before that.
            ServerError: It was neither attested nor lost in time.
        """
        deadline = time.monotonic() + self._request_timeout
        while not left.done() and (server.version is None or server.version < newest):
            news = {left, server.next_attestation()}
            seconds = deadline - time.monotonic()
            done, _ = await asyncio.wait(news, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ServerError(
                    f"{server.url} wrote under version {newest}, which was not attested within "
                    f"rollout.request_timeout_seconds = {self._request_timeout:g}."
                )
        if left.done():
            self.num_failed_requests += 1
            raise _GivenBack(f"{server.url} was lost before version {newest} was attested")

    async def _request(self, server: Server, request: GenerateRequest) -> Generation:
        try:
            async with asyncio.timeout(self._request_timeout):
                generation = await server.client.generate(request)
        except TimeoutError as error:
            raise ServerError(
                f"{server.url} did not finish a completion of at most {request.max_new_tokens} "
                f"tokens within rollout.request_timeout_seconds = {self._request_timeout:g}."
            ) from error
        check_generation(generation, request, self._vocab_size, server.url)
        return generation

    def _record_failure(self, server: Server, started_at: float, error: ServerError) -> None:
        """Counts a failure; a burst of requests that died together counts once.

        When a server with 200 requests goes down, all 200 fail at the same moment. Only a
        request that was sent after the last failure says that the server is still down.
        """
        self.num_failed_requests += 1
        self.last_error = str(error)
        if started_at < server.last_failure_at:
            return
        now = time.monotonic()
        server.last_failure_at = now
        backoff = _FIRST_BACKOFF_SECONDS * 2 ** min(server.failures_in_a_row, 16)
        server.retry_at = now + min(backoff, _LONGEST_BACKOFF_SECONDS)
        server.failures_in_a_row += 1
        self._consecutive_failures += 1
        logger.warning("A completion failed: %s", error)
        if self._consecutive_failures >= self._max_consecutive_failures:
            raise ServersFailing(
                f"{self._consecutive_failures} completions in a row failed "
                f"(rollout.max_consecutive_failures), the last on {server.url}: {error}"
            ) from error

    async def _next_server(self, floor: int, error: ServerError) -> Server:
        """Waits until a server of at least version ``floor`` is ready."""
        deadline = time.monotonic() + self._request_timeout
        while (server := self.choose(lambda version: version >= floor)) is None:
            if self._is_closed:
                raise error
            if time.monotonic() > deadline:
                raise ServerError(
                    f"No server of policy_version {floor} or newer could take a completion over "
                    f"within rollout.request_timeout_seconds = {self._request_timeout:g}, after: "
                    f"{error}"
                ) from error
            await asyncio.sleep(_LOOK_SECONDS)
        return server
