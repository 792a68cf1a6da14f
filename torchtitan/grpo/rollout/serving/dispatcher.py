# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sends requests to servers and handles the failures of servers.

A server receives requests only while the weight pusher has attested which version it serves::

    WAITING --version attested--> READY --lost, or found with old weights--> WAITING
    WAITING, READY --cut--> CUT --asleep or not, admitted--> WAITING
    WAITING --asleep--> ASLEEP --woken, version attested--> READY
    any state --ended--> DOWN --restarted--> WAITING        any state --removed--> forgotten
    ASLEEP --lost--> WAITING

All rollouts of a group start on one server, which then computes the prompt only once. If a
server leaves READY, its unfinished completions are generated again from the beginning, by any
READY server whose weights are not older than those of the first attempt. If a server is cut, because
its devices are needed, its completions keep the tokens that they have.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.serving.attempts import Attempts, GivenBack, ServersFailing
from torchtitan.grpo.rollout.serving.concurrency import ConcurrencyWindow
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.server_state import Job, Patience, Server, best_server
from torchtitan.grpo.system.waits import wait_at_most
from torchtitan.grpo.types import Generation, Prompt

__all__ = ["Dispatcher", "Server", "ServersFailing"]

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
# A connection that failed counts less: the server may be lost, which becomes known later. A request
# that timed out counts in full.
_FAILED_CONNECTION = 0.25
_CLOSE_SECONDS = 0.7
# How long a server that is cut may take to answer its requests with the tokens that they have, and
# when it is asked again, because a request may have overtaken the first time.
_CUT_SECONDS = 5.0
_CUT_AGAIN_SECONDS = 0.5
# Poll interval of a completion that waits for a server.
_RETRY_SECONDS = 0.5
# Weight of a new completion's length in the running mean of lengths.
_LENGTH_GAIN = 0.02
_LOAD_PERIOD_SECONDS = 1.0


@dataclass(eq=False)
class _Completion:
    """A completion in flight. ``floor`` is the oldest version that may generate it.

    ``place`` is the server that the completion is on, and its job there.
    """

    prompt: Prompt
    sampling: Sampling
    floor: int
    expected_tokens: float
    allowed: Callable[[Server], bool] | None = None
    place: tuple[Server, Job] | None = None

    @property
    def is_evaluation(self) -> bool:
        return self.allowed is not None


class Dispatcher:
    """Manages all servers and the completions in flight on them.

    Callers of :meth:`submit` must respect ``max_concurrent_rollouts``. The dispatcher only divides
    this limit among the windows of servers. ``listeners`` are called when a server may have become
    free or ready. ``in_flight`` does not count completions of evaluations.
    """

    def __init__(
        self,
        clients: Sequence[InferenceClient],
        config: Rollout,
        *,
        vocab_size: int,
        group_size: int = 1,
        drops: DropLog | None = None,
    ) -> None:
        self.in_flight = self.num_held = 0
        self.in_flight_evaluation = 0
        self.listeners: list[Callable[[], None]] = []
        self.num_cut = 0
        self._config, self._group_size = config, group_size
        self.attempts = Attempts(config, vocab_size, self.set_lost, drops or DropLog())
        self._mean_tokens: float | None = None
        self._is_closed = False
        self._attested = asyncio.Event()  # replaced each time
        # Request IDs must be unique on a server that several runs share.
        self._run_id = uuid.uuid4().hex[:12]
        self._counter = itertools.count()
        self.servers = {client.url: Server(client) for client in clients}
        for server in self.servers.values():
            server.window = self._window()

    # -- servers ----------------------------------------------------------------------

    def add(self, client: InferenceClient) -> None:
        assert client.url not in self.servers, f"{client.url} must not be added twice"
        server = self.servers[client.url] = Server(client)
        server.window = self._window()

    def remove(self, url: str) -> list[asyncio.Task[Generation]]:
        """Removes a server, and moves its completions to other servers.

        Returns the cancelled requests. They still notify the server, so await them before closing its client.
        """
        server = self.servers.pop(url)
        self._leave_ready(server)
        return list(server.requests)

    def set_version(self, url: str, version: int, pause_seconds: float = 0.0) -> None:
        server = self.servers.get(url)
        # Late news must not bring requests to a server that has ended, or that is about to sleep.
        if server is None or server.is_down or server.is_cut:
            return
        server.attest(version, pause_seconds)
        self._attested.set()
        self._attested = asyncio.Event()
        self._changed()

    def set_lost(self, url: str, reason: str) -> None:
        """Stops requests to the server at ``url`` and moves its completions to other servers."""
        server = self.servers.get(url)
        if server is None:
            return
        logger.warning(
            "Server %s gets no requests until its weights are updated again: %s", url, reason
        )
        self.attempts.last_error = f"{url}: {reason}"
        server.is_asleep = False
        self._leave_ready(server)

    def set_down(self, url: str, reason: str) -> None:
        if url in self.servers:
            self.servers[url].is_down = True
        self.set_lost(url, reason)

    def set_asleep(self, url: str) -> None:
        """Notes that a server sleeps until a version is attested again. Call :meth:`cut` before."""
        server = self.servers.get(url)
        if server is not None:
            server.is_asleep = True
            server.cut()
            self._leave_ready(server)

    async def until_attested(self, seconds: float) -> None:
        """Waits until a version of any server is attested, but not longer than ``seconds``."""
        await wait_at_most(seconds, self._attested)

    async def cut(self, url: str) -> int:
        """Ends the requests of the server at ``url`` now. It gets no more until :meth:`admit` is called.

        Completions keep the tokens that they have, and continue on other servers, or later on this one.
        If the server does not answer within five seconds, its completions are generated again, but do
        not count as failed. Returns the number of requests that the server had.
        """
        server = self.servers.get(url)
        if server is None:
            return 0
        server.is_cut = True
        if server.version is None:
            return 0
        num_requests = len(server.requests)
        self.num_cut += num_requests
        server.cut()
        deadline = time.monotonic() + _CUT_SECONDS
        try:
            while server.requests and (left := deadline - time.monotonic()) > 0:
                await self._abort_all(server, left)
        finally:
            self._leave_ready(server)
        return num_requests

    def admit(self, url: str) -> None:
        """Lets a server that was cut become READY again, once a version is attested."""
        if url in self.servers:
            server = self.servers[url]
            server.is_cut = server.is_asleep = server.is_lost = False

    async def _abort_all(self, server: Server, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await server.client.abort(None)
        except (ServerError, TimeoutError) as error:
            logger.warning("%s did not abort its requests: %r", server.url, error)
        if server.requests:
            await asyncio.wait(server.requests, timeout=min(seconds, _CUT_AGAIN_SECONDS))

    def set_running(self, url: str) -> None:
        if url in self.servers:
            self.servers[url].is_down = False
            self.servers[url].window = self._window()

    async def watch_loads(self) -> None:
        """Polls the servers' loads forever. Silent servers get no work that others can take."""
        while True:
            running = [s for s in self.servers.values() if not (s.is_down or s.is_asleep)]
            await asyncio.gather(*(server.ask_load() for server in running))
            self._changed()
            await asyncio.sleep(_LOAD_PERIOD_SECONDS)

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for url, server in self.servers.items():
            name = f"servers/{url.partition('://')[2]}"
            values |= {f"{name}/{key}": value for key, value in server.metrics().items()}
        return values

    def take_shares(self) -> dict[str, float]:
        """Returns how each server has spent the time since the last call; see :meth:`Server.take_shares`."""
        return {
            f"servers/{url.partition('://')[2]}/{name}": share
            for url, server in self.servers.items()
            for name, share in server.take_shares().items()
        }

    def _leave_ready(self, server: Server) -> None:
        server.leave()
        for other in self.servers.values():
            if other.window is not None and not other.is_lost:
                other.window.offer(self._quota())
        self._changed()

    def _window(self) -> ConcurrencyWindow | None:
        if not self._config.adaptive_concurrency:
            return None
        ceiling = self._config.max_concurrent_rollouts
        return ConcurrencyWindow(floor=self._group_size, ceiling=ceiling, quota=self._quota())

    def _quota(self) -> int:
        # A server that sleeps keeps its part, because work would otherwise pile up on the others.
        num_servers = sum(
            not server.is_lost or (not server.is_down and (server.is_cut or server.is_asleep))
            for server in self.servers.values()
        )
        return -(-self._config.max_concurrent_rollouts // max(num_servers, 1))

    # -- completions ------------------------------------------------------------------

    def choose(
        self,
        usable: Callable[[int], bool],
        *,
        prefer: str | None = None,
        has_begun: bool = False,
    ) -> Server | None:
        """Returns the best server whose version is usable, or None. ``prefer`` is a server's URL."""
        return best_server(
            self.ready(usable),
            num_completions=self._group_size,
            prefer=self.servers.get(prefer) if prefer is not None else None,
            has_begun=has_begun,
        )

    def submit(
        self,
        prompt: Prompt,
        server: Server,
        sampling: Sampling,
        *,
        expected_tokens: float | None = None,
        allowed: Callable[[Server], bool] | None = None,
    ) -> asyncio.Task[Generation]:
        """Starts one completion on a ready ``server``. It is in flight immediately.

        A failed request is retried once, or a few times if the connection failed, or as often as
        necessary if the server was lost. If the server is cut, the answer may be incomplete
        (it ends with ``length`` before ``max_new_tokens``), and the caller must continue it. The task
        raises :class:`ServerError` if all attempts failed, or no server took the completion within
        ``rollout.request_timeout_seconds``, and :class:`ServersFailing` if the run must stop.

        ``expected_tokens`` includes later segments. The default is the mean of the answers so far.
        ``allowed`` is given only for evaluations, and says which servers may generate the completion.
        """
        assert server.version is not None, f"{server.url} is not ready"
        if expected_tokens is None:
            longest = float(sampling.max_new_tokens)
            expected_tokens = longest if self._mean_tokens is None else self._mean_tokens
        completion = _Completion(prompt, sampling, server.version, expected_tokens, allowed)
        self._place(completion, server)
        self._count_flight(1, completion.is_evaluation)
        task = asyncio.create_task(self._complete(completion))
        task.add_done_callback(lambda _: self._release(completion))
        return task

    @contextmanager
    def hold(self, server: Server | None = None, *, is_evaluation: bool = False) -> Iterator[None]:
        """Counts a completion as in flight on ``server``, or on none, while no server generates it."""
        self._count_flight(1, is_evaluation)
        self.num_held += not is_evaluation
        job = server and server.begin_job(
            self._mean_tokens or 1.0, is_evaluation=is_evaluation, is_held=True
        )
        try:
            yield
        finally:
            if server and job:
                server.end_job(job)
            self.num_held -= not is_evaluation
            self._count_flight(-1, is_evaluation)

    async def close(self) -> None:
        """Cancels all completions in flight and notifies the servers, in bounded time."""
        self._is_closed = True
        requests = [task for server in self.servers.values() for task in server.requests]
        for server in self.servers.values():
            server.leave()
        if requests:
            await asyncio.wait(requests, timeout=_CLOSE_SECONDS)

    def ready(
        self, usable: Callable[[int], bool], allowed: Callable[[Server], bool] | None = None
    ) -> list[Server]:
        """Returns the allowed servers whose version is usable.

        Servers that do not report their load are left out, unless none of them does.
        """
        found = [
            server
            for server in self.servers.values()
            if server.is_ready() and server.version is not None and usable(server.version)
            if allowed is None or allowed(server)
        ]
        return [server for server in found if not server.is_silent] or found

    def _place(self, completion: _Completion, server: Server) -> None:
        is_evaluation = completion.is_evaluation
        # The indices of held-out prompts are not group IDs.
        group_id = None if is_evaluation else completion.prompt.group_id
        job = server.begin_job(completion.expected_tokens, group_id, is_evaluation=is_evaluation)
        completion.place = server, job

    def _vacate(self, completion: _Completion, num_tokens: int | None = None) -> None:
        if completion.place is not None:
            server, job = completion.place
            server.end_job(job, num_tokens)
            completion.place = None

    def _release(self, completion: _Completion) -> None:
        self._vacate(completion)  # its attempt may have been cancelled before it began
        self._count_flight(-1, completion.is_evaluation)

    def _count_flight(self, change: int, is_evaluation: bool) -> None:
        if is_evaluation:
            self.in_flight_evaluation += change
        else:
            self.in_flight += change
        if change < 0:
            self._changed()

    def _changed(self) -> None:
        for listener in self.listeners:
            listener()

    async def _complete(self, completion: _Completion) -> Generation:
        num_failed = 0.0
        while True:
            try:
                return await self._attempt(completion)
            except ServerError as error:
                if not isinstance(error, GivenBack):
                    num_failed += 1.0 if error.was_answered else _FAILED_CONNECTION
                if num_failed >= _ATTEMPTS:
                    raise
                self._place(completion, await self._next_server(completion, error))

    async def _attempt(self, completion: _Completion) -> Generation:
        assert completion.place is not None, "a completion has a place before it is requested"
        server, job = completion.place
        request_id = f"{self._run_id}-{completion.prompt.group_id}-{next(self._counter)}-"
        request = completion.sampling.request(request_id, completion.prompt)
        try:
            generation = await self.attempts.run(server, job, request)
        except BaseException:  # also if it was cancelled
            self._vacate(completion)
            raise
        num_tokens = len(generation.token_ids)
        if job.is_cut:
            self._vacate(completion)
            return generation  # it may be a part
        self._vacate(completion, num_tokens)
        if completion.is_evaluation:
            return generation  # its prompt and settings differ, and so does its length
        former = num_tokens if self._mean_tokens is None else self._mean_tokens
        self._mean_tokens = former + _LENGTH_GAIN * (num_tokens - former)
        return generation

    async def _next_server(self, completion: _Completion, error: ServerError) -> Server:
        """Waits for a server. Prefers one that runs completions of the same group, as it has the prompt."""
        seconds, floor = self._config.request_timeout_seconds, completion.floor
        patience, group_id = Patience(seconds), completion.prompt.group_id
        while True:
            ready = self.ready(lambda version: version >= floor, completion.allowed)
            holders = (s for s in ready if any(job.group_id == group_id for job in s.jobs))
            server = best_server(ready, prefer=next(holders, None), has_begun=True)
            if server is not None:
                return server
            if self._is_closed:
                raise error
            if patience.has_ended(self.servers.values()):
                raise ServerError(
                    f"No server of policy_version {floor} or newer could retry a completion "
                    f"within rollout.request_timeout_seconds = {seconds:g}. The "
                    f"previous attempt failed: {error}"
                ) from error
            await self.until_attested(_RETRY_SECONDS)
