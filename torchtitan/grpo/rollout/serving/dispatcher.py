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

In reading order: `server_state` (one server), `concurrency` (how much it is given), `placement`
(who is given what), `attempts` (one request), `hedging` (two of them), `load_watch`.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.rollout.serving.attempts import Attempts, GivenBack, ServersFailing
from torchtitan.grpo.rollout.serving.concurrency import ConcurrencyWindow
from torchtitan.grpo.rollout.serving.hedging import first_answer, is_overdue
from torchtitan.grpo.rollout.serving.load_watch import watch_loads
from torchtitan.grpo.rollout.serving.placement import best_server, holder_of
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.server_state import Job, Server
from torchtitan.grpo.types import Generation, Prompt

__all__ = ["Dispatcher", "Server", "ServersFailing"]

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
_CLOSE_SECONDS = 0.7
# How often a completion that no server can take looks for one.
_LOOK_SECONDS = 0.05
# Of the difference between a completion's length and the mean so far.
_LENGTH_GAIN = 0.02


@dataclass(eq=False)
class _Completion:
    """One completion, from submission to its end.

    Attributes:
        floor: The oldest version it takes.
        jobs: Its place on each server that has it now: none, one, or two where it is hedged.
    """

    prompt: Prompt
    sampling: Sampling
    floor: int
    expected_tokens: float
    jobs: dict[Server, Job] = field(default_factory=dict)


class Dispatcher:
    """All servers, and the completions in flight on them.

    Args:
        clients: One for each server.
        vocab_size: Sampled token ids must be below it.
        request_timeout_seconds: ``rollout.request_timeout_seconds``.
        max_consecutive_failures: ``rollout.max_consecutive_failures``.
        group_size: ``grpo.group_size``.
        max_concurrent_rollouts: ``rollout.max_concurrent_rollouts``; None is no bound. Whoever
            submits keeps to it; here it bounds windows and hedges.
        adaptive_concurrency: ``rollout.adaptive_concurrency``; nothing without that bound.
        hedge_seconds: ``rollout.hedge_seconds``.

    Attributes:
        servers: By URL.
        in_flight: Completions submitted and not ended, over all servers; twice where hedged.
        listeners: Called when a server may have become free or ready.
        num_hedged: Completions that were asked of a second server.
        num_hedges_won: Those that the second server answered first.
    """

    def __init__(
        self,
        clients: Sequence[InferenceClient],
        *,
        vocab_size: int,
        request_timeout_seconds: float,
        max_consecutive_failures: int,
        group_size: int = 1,
        max_concurrent_rollouts: int | None = None,
        adaptive_concurrency: bool = True,
        hedge_seconds: float = 0.0,
    ) -> None:
        self.in_flight = 0
        self.listeners: list[Callable[[], None]] = []
        self.num_hedged = 0
        self.num_hedges_won = 0
        self._attempts = Attempts(
            vocab_size=vocab_size,
            request_timeout_seconds=request_timeout_seconds,
            max_consecutive_failures=max_consecutive_failures,
            set_lost=self.set_lost,
        )
        self._request_timeout = request_timeout_seconds
        self._group_size = group_size
        self._max_concurrent = max_concurrent_rollouts
        self._is_adaptive = adaptive_concurrency
        self._hedge_seconds = hedge_seconds
        self._mean_tokens: float | None = None
        self._is_closed = False
        # Ids of other runs on the same server must not collide with ours.
        self._run_id = uuid.uuid4().hex[:12]
        self._counter = itertools.count()
        self.servers = {client.url: Server(client) for client in clients}
        for server in self.servers.values():
            server.window = self._window()

    @property
    def num_failed_requests(self) -> int:
        """Requests without a usable answer."""
        return self._attempts.num_failed

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return self._attempts.num_tokens

    @property
    def last_error(self) -> str:
        """The last failure of a request or loss of a server; empty at first."""
        return self._attempts.last_error

    # -- servers ----------------------------------------------------------------------

    def add(self, client: InferenceClient) -> None:
        """One more server, WAITING."""
        assert client.url not in self.servers, f"{client.url} is a server already"
        server = self.servers[client.url] = Server(client)
        server.window = self._window()

    def remove(self, url: str) -> list[asyncio.Task[Generation]]:
        """Forgets a server. What it had is given back at once.

        Returns:
            Requests that it is still being told of; close its client after them.
        """
        server = self.servers.pop(url)
        server.leave()
        self._share_windows()
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
        self._attempts.last_error = f"{url}: {reason}"
        server.leave()
        self._share_windows()
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
            self.servers[url].window = self._window()

    async def watch_loads(self) -> None:
        """Follows the servers' load, for ever; without it, failures alone are pressure."""
        await watch_loads(self.servers, self._changed)

    def metrics(self) -> dict[str, float]:
        """What each server is doing now, and the hedges of the whole run.

        Of a server's own report (running, waiting, kv_use) only what is known.
        """
        values = {
            "rollout/hedged_completions": float(self.num_hedged),
            "rollout/hedges_won": float(self.num_hedges_won),
        }
        for url, server in self.servers.items():
            name = f"servers/{url.partition('://')[2]}"
            values |= {f"{name}/{key}": value for key, value in server.metrics().items()}
        return values

    def _window(self) -> ConcurrencyWindow | None:
        if self._max_concurrent is None or not self._is_adaptive:
            return None
        return ConcurrencyWindow(
            floor=self._group_size, ceiling=self._max_concurrent, share=self._share()
        )

    def _share(self) -> int:
        """Of ``rollout.max_concurrent_rollouts``, for each server that is not lost."""
        num_servers = sum(not server.is_lost for server in self.servers.values())
        return -(-(self._max_concurrent or 0) // max(num_servers, 1))

    def _share_windows(self) -> None:
        for server in self.servers.values():
            if server.window is not None:
                server.window.offer(self._share())

    # -- completions ------------------------------------------------------------------

    def choose(
        self,
        usable: Callable[[int], bool],
        *,
        prefer: str | None = None,
        has_begun: bool = False,
    ) -> Server | None:
        """The server for a group or a completion; None while there is none.

        It is ready, its version is ``usable``, its window is not full, and of those that have
        room for a whole group it has the least work left.

        Args:
            usable: Whether a server of that version will do.
            prefer: URL of a server that has the prefix; chosen where it may be.
            has_begun: It is no new work, and does not wait for room in a window.
        """
        return best_server(
            self._ready(usable),
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
    ) -> asyncio.Task[Generation]:
        """Starts one completion on a ready ``server``; it is in flight from now on.

        A failed request is sent once more, one that was given back as often as it takes: to a
        ready server whose weights are not older than those of the first, as soon as there is one.

        Args:
            prompt: What is asked.
            server: From :meth:`choose`.
            sampling: How it is answered.
            expected_tokens: What is probably still to be written, beyond this request too where
                it is one of several segments; None is the mean of the answers so far.

        Returns:
            A task that raises :class:`ServerError` where both tries failed, or where no
            server could take it within ``rollout.request_timeout_seconds``, and
            :class:`ServersFailing` where ``rollout.max_consecutive_failures`` was reached.
        """
        assert server.version is not None, f"{server.url} is not ready"
        if expected_tokens is None:
            longest = float(sampling.max_new_tokens)
            expected_tokens = longest if self._mean_tokens is None else self._mean_tokens
        completion = _Completion(prompt, sampling, server.version, expected_tokens)
        self._place(completion, server)
        self.in_flight += 1
        task = asyncio.create_task(self._complete(completion, server))
        task.add_done_callback(lambda _: self._release(completion))
        return task

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Counts a completion as in flight that no server writes just now: its environment
        works, and nothing new is to take its place."""
        self.in_flight += 1
        try:
            yield
        finally:
            self._leave_flight()

    async def close(self) -> None:
        """Cancels what is in flight, so that the servers are told. Bounded in time."""
        self._is_closed = True
        requests = [task for server in self.servers.values() for task in server.requests]
        for server in self.servers.values():
            server.leave()
        if requests:
            await asyncio.wait(requests, timeout=_CLOSE_SECONDS)

    def _ready(self, usable: Callable[[int], bool]) -> list[Server]:
        return [
            server
            for server in self.servers.values()
            if server.is_ready() and server.version is not None and usable(server.version)
        ]

    def _place(self, completion: _Completion, server: Server) -> None:
        job = server.begin_job(completion.expected_tokens, completion.prompt.index)
        completion.jobs[server] = job

    def _vacate(
        self, completion: _Completion, server: Server, num_tokens: int | None = None
    ) -> None:
        job = completion.jobs.pop(server, None)
        if job is not None:
            server.end_job(job, num_tokens)

    def _release(self, completion: _Completion) -> None:
        for server in list(completion.jobs):  # an attempt that was cancelled before it began
            self._vacate(completion, server)
        self._leave_flight()

    def _leave_flight(self) -> None:
        self.in_flight -= 1
        self._changed()

    def _changed(self) -> None:
        for listener in self.listeners:
            listener()

    async def _complete(self, completion: _Completion, server: Server) -> Generation:
        num_failures = 0
        while True:
            try:
                return await self._answer(completion, server)
            except ServerError as error:
                num_failures += not isinstance(error, GivenBack)
                if num_failures == _ATTEMPTS:
                    raise
                server = await self._next_server(completion, error)
            self._place(completion, server)

    async def _answer(self, completion: _Completion, server: Server) -> Generation:
        if self._hedge_seconds == 0:
            return await self._attempt(completion, server)
        generation, is_hedge = await first_answer(
            asyncio.create_task(self._attempt(completion, server)),
            lambda: self._hedge(completion, server),
            max(self._hedge_seconds / 4, _LOOK_SECONDS),
        )
        self.num_hedges_won += is_hedge
        return generation

    async def _attempt(self, completion: _Completion, server: Server) -> Generation:
        """One request on a server where the completion has a place, which it gives up."""
        request_id = f"{self._run_id}-{completion.prompt.index}-{next(self._counter)}-"
        request = completion.sampling.request(request_id, completion.prompt)
        try:
            generation = await self._attempts.run(server, completion.jobs[server], request)
            num_tokens = len(generation.token_ids)
            self._vacate(completion, server, num_tokens)
        finally:
            self._vacate(completion, server)  # where it failed; else it has left already
        former = num_tokens if self._mean_tokens is None else self._mean_tokens
        self._mean_tokens = former + _LENGTH_GAIN * (num_tokens - former)
        return generation

    def _hedge(self, completion: _Completion, first: Server) -> asyncio.Task[Generation] | None:
        """Asks a second server where the first seems to have stalled; None where none may be."""
        job, longest = completion.jobs[first], completion.sampling.max_new_tokens
        if not is_overdue(first, job, longest, self._hedge_seconds, time.monotonic()):
            return None
        if self._max_concurrent is not None and self.in_flight >= self._max_concurrent:
            return None
        others = self._ready(lambda version: version >= completion.floor)
        second = best_server(server for server in others if server is not first)
        if second is None:
            return None
        logger.warning(
            "%s has not answered for %.1f s; %s is asked as well (rollout.hedge_seconds).",
            first.url, time.monotonic() - job.started_at, second.url,
        )  # fmt: skip
        self.num_hedged += 1
        self._place(completion, second)
        self.in_flight += 1
        task = asyncio.create_task(self._attempt(completion, second))
        task.add_done_callback(lambda _: self._leave_flight())
        return task

    async def _next_server(self, completion: _Completion, error: ServerError) -> Server:
        """Waits until a server of at least the completion's version is ready.

        Of several, the one where others of its group have gone, which has the prompt.
        """
        deadline, floor = time.monotonic() + self._request_timeout, completion.floor
        while True:
            ready = self._ready(lambda version: version >= floor)
            holder = holder_of(completion.prompt.index, ready)
            server = best_server(ready, prefer=holder, has_begun=True)
            if server is not None:
                return server
            if self._is_closed:
                raise error
            if time.monotonic() > deadline:
                raise ServerError(
                    f"No server of policy_version {floor} or newer could take a completion over "
                    f"within rollout.request_timeout_seconds = {self._request_timeout:g}, after: "
                    f"{error}"
                ) from error
            await asyncio.sleep(_LOOK_SECONDS)
