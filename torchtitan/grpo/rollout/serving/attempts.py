# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One request on one server: its answer, or what its failure says of the server.

A server names new weights as soon as it has them, a little before they are attested. What
was written under them is held back until then: if they turn out to be wrong, it is lost
with the server.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.requests import check_generation
from torchtitan.grpo.rollout.serving.server_state import Job, Server
from torchtitan.grpo.types import GenerateRequest, Generation

logger = logging.getLogger(__name__)


class ServersFailing(RuntimeError):
    """Too many completions in a row failed on the servers: the run must stop."""


class GivenBack(ServerError):
    """The server left READY while it wrote: no sign that requests fail on it."""


class Attempts:
    """Sends requests, and counts what becomes of them.

    Args:
        vocab_size: Sampled token ids must be below it.
        request_timeout_seconds: ``rollout.request_timeout_seconds``.
        max_consecutive_failures: ``rollout.max_consecutive_failures``.
        set_lost: Told, with a reason, of a server that must be synchronised again.

    Attributes:
        num_failed: Requests without a usable answer.
        num_tokens: Tokens generated.
        last_error: Of the last request that failed; empty at first.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        request_timeout_seconds: float,
        max_consecutive_failures: int,
        set_lost: Callable[[str, str], None],
    ) -> None:
        self._vocab_size = vocab_size
        self._request_timeout = request_timeout_seconds
        self._max_consecutive_failures = max_consecutive_failures
        self._set_lost = set_lost
        self._consecutive_failures = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.last_error = ""

    async def run(self, server: Server, job: Job, request: GenerateRequest) -> Generation:
        """The server's answer, usable and of attested weights.

        Cancelled, it has the server told, and does not wait for that.

        Raises:
            GivenBack: The server left READY.
            ServerError: It gave no usable answer, or none in time.
            ServersFailing: That has now happened too often.
        """
        attested = server.version
        if attested is None:
            raise GivenBack(f"{server.url} was lost before it was sent a request")
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
            self.num_failed += 1
            raise GivenBack(f"{server.url} was lost while it wrote a completion")
        try:
            generation = task.result()
            await self._check_versions(server, generation, attested, left)
        except GivenBack:
            self.num_failed += 1
            raise
        except ServerError as error:
            self._record_failure(server, job, error)
            raise
        self._consecutive_failures = 0
        server.failures_in_a_row = 0
        self.num_tokens += len(generation.token_ids)
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

    async def _check_versions(
        self, server: Server, generation: Generation, attested: int, left: asyncio.Future[None]
    ) -> None:
        versions = [segment.version for segment in generation.segments]
        if max(versions) > attested:
            await self._until_attested(server, max(versions), left)
        if server.version is not None and min(versions) < attested:
            # It was restarted: no more work until its weights are attested again.
            self._set_lost(server.url, f"it answered with version {min(versions)}, not {attested}")

    async def _until_attested(
        self, server: Server, newest: int, left: asyncio.Future[None]
    ) -> None:
        """Returns when ``newest``, which the server names, was attested.

        Raises:
            GivenBack: The server left READY before that.
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
            raise GivenBack(f"{server.url} was lost before version {newest} was attested")

    def _record_failure(self, server: Server, job: Job, error: ServerError) -> None:
        """Counts a failure; a burst of requests that died together counts once.

        When a server with 200 requests goes down, all 200 fail at the same moment. Only a
        request that was sent after the last failure says that the server is still down.
        """
        self.num_failed += 1
        self.last_error = str(error)
        is_news = job.started_at >= server.last_failure_at
        server.fail(job, is_news=is_news)
        if not is_news:
            return
        self._consecutive_failures += 1
        logger.warning("A completion failed: %s", error)
        if self._consecutive_failures >= self._max_consecutive_failures:
            raise ServersFailing(
                f"{self._consecutive_failures} completions in a row failed "
                f"(rollout.max_consecutive_failures = {self._max_consecutive_failures}), "
                f"the last on {server.url}: {error}"
            ) from error
