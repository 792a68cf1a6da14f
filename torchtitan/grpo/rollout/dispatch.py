# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sends prompts to servers and carries their failures.

A server gets work only while the weight pusher has attested which version it serves::

    WAITING --version served--> READY --lost, or caught with old weights--> WAITING

All rollouts of a group start on one server, which then computes the prompt once.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 5.0
_CLOSE_SECONDS = 0.7


class ServersFailing(RuntimeError):
    """Too many completions in a row failed on the servers: the run must stop."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled; lengths in tokens."""

    max_new_tokens: int
    max_total_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False

    def request(self, request_id: str, prompt: Prompt) -> GenerateRequest:
        """The request for one completion, cut so that prompt and completion fit."""
        return GenerateRequest(
            request_id=request_id,
            prompt_ids=prompt.token_ids.tolist(),
            max_new_tokens=min(self.max_new_tokens, self.max_total_tokens - len(prompt.token_ids)),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


@dataclass(eq=False)
class Server:
    """One server, as dispatch sees it. ``version`` is None while it is WAITING."""

    client: InferenceClient
    version: int | None = None
    load: int = 0
    requests: set[asyncio.Task[Generation]] = field(default_factory=set)
    retry_at: float = 0.0
    last_failure_at: float = 0.0
    failures_in_a_row: int = 0

    @property
    def url(self) -> str:
        return self.client.url

    def is_ready(self) -> bool:
        """Attested, and not in the pause after a failure."""
        return self.version is not None and time.monotonic() >= self.retry_at


class Dispatcher:
    """All servers, and the completions in flight on them.

    Args:
        clients: One for each server.
        vocab_size: Sampled token ids must be below it.
        request_timeout_seconds: ``rollout.request_timeout_seconds``.
        max_consecutive_failures: ``rollout.max_consecutive_failures``.
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
        self._vocab_size = vocab_size
        self._request_timeout = request_timeout_seconds
        self._max_consecutive_failures = max_consecutive_failures
        self._consecutive_failures = 0
        # Called when a server may have become free or ready.
        self.listeners: list[Callable[[], None]] = []
        # Ids of other runs on the same server must not collide with ours.
        self._run_id = uuid.uuid4().hex[:12]
        self._counter = itertools.count()
        self.num_failed_requests = 0
        self.num_tokens = 0
        self.last_error = ""

    @property
    def in_flight(self) -> int:
        """Completions being written now, over all servers."""
        return sum(server.load for server in self.servers.values())

    def set_version(self, url: str, version: int) -> None:
        """The server at ``url`` serves ``version``, attested: it may get work."""
        server = self.servers[url]
        server.version = version
        server.retry_at = 0.0
        self._changed()

    def set_lost(self, url: str, reason: str) -> None:
        """The server at ``url`` gets no more work, and what it had is given up."""
        server = self.servers[url]
        logger.warning("Server %s gets no work until it is synchronised again: %s", url, reason)
        server.version = None
        self.last_error = f"{url}: {reason}"
        for request in list(server.requests):
            request.cancel()
        self._changed()

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

        A failed request is sent once more: to another ready server whose weights are not
        older than those of the first, or else to the same one.

        Returns:
            A task that raises :class:`ServerError` where both tries failed, and
            :class:`ServersFailing` where ``rollout.max_consecutive_failures`` was reached.
        """
        server.load += 1
        task = asyncio.create_task(self._generate(prompt, server, sampling))
        task.add_done_callback(lambda _: self._release(server))
        return task

    def _release(self, server: Server) -> None:
        server.load -= 1
        self._changed()

    def _changed(self) -> None:
        for listener in self.listeners:
            listener()

    async def _generate(self, prompt: Prompt, server: Server, sampling: Sampling) -> Generation:
        floor = server.version
        if floor is None:
            raise ServerError(f"{server.url} was lost before it was sent a request")
        for attempt in range(_ATTEMPTS):
            request_id = f"{self._run_id}-{prompt.index}-{next(self._counter)}-"
            try:
                return await self._attempt(server, sampling.request(request_id, prompt))
            except ServerError as error:
                if attempt == _ATTEMPTS - 1:
                    raise
                server = await self._second_choice(server, floor, error)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Cancels what is in flight, so that the servers are told. Bounded in time."""
        requests = [task for server in self.servers.values() for task in server.requests]
        for server in self.servers.values():
            server.version = None  # nothing is tried again
        for request in requests:
            request.cancel()
        if requests:
            await asyncio.wait(requests, timeout=_CLOSE_SECONDS)

    async def _attempt(self, server: Server, request: GenerateRequest) -> Generation:
        started_at = time.monotonic()
        attested = server.version
        assert attested is not None, f"{server.url} is not ready"
        task = asyncio.ensure_future(self._request(server, request))
        server.requests.add(task)
        try:
            generation = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            # set_lost() cancelled the request. The loss is known and handled by whoever
            # reported it, so it is no further sign that the servers fail.
            self.num_failed_requests += 1
            raise ServerError(f"{server.url} was lost while it wrote a completion") from None
        except ServerError as error:
            self._record_failure(server, started_at, error)
            raise
        finally:
            server.requests.discard(task)
        self._consecutive_failures = 0
        server.failures_in_a_row = 0
        self.num_tokens += len(generation.token_ids)
        oldest = min(segment.version for segment in generation.segments)
        if server.version is not None and oldest < attested:
            # It was restarted: no more work until its weights are attested again.
            self.set_lost(server.url, f"it answered with version {oldest}, not {attested}")
        return generation

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

    async def _second_choice(self, failed: Server, floor: int, error: ServerError) -> Server:
        other = self.choose(lambda version: version >= floor)
        if other is not None:
            return other
        # Only the server that failed is left, in its pause.
        await asyncio.sleep(max(0.0, failed.retry_at - time.monotonic()))
        if failed.version is None or failed.version < floor:
            raise error
        return failed


def check_generation(
    generation: Generation, request: GenerateRequest, vocab_size: int, url: str
) -> None:
    """Refuses an answer that cannot be trained on.

    Raises:
        ServerError: It is empty, aborted, too long, not of this vocabulary, has no finite
            logprob for each token, or does not say which version wrote which token.
    """
    ids, num_tokens = generation.token_ids, len(generation.token_ids)
    covered = [position for s in generation.segments for position in (s.start, s.end)]
    problem = None
    if generation.finish_reason == "abort":
        problem = f"it was aborted after {num_tokens} tokens"
    elif not 0 < num_tokens <= request.max_new_tokens:
        problem = f"it has {num_tokens} tokens, expected 1 to {request.max_new_tokens}"
    elif not (ids.min() >= 0 and ids.max() < vocab_size):
        problem = f"its token ids reach {ids.max()}, and the model has {vocab_size}"
    elif len(generation.logprobs) != num_tokens or not np.isfinite(generation.logprobs).all():
        problem = f"its {len(generation.logprobs)} logprobs are not one finite number a token"
    elif covered[:1] != [0] or covered[-1:] != [num_tokens] or covered[1:-1:2] != covered[2:-1:2]:
        problem = f"its version segments {generation.segments} do not cover {num_tokens} tokens"
    if problem is not None:
        raise ServerError(f"{url} answered with a completion that cannot be used: {problem}.")
