# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sends a request to a server and judges what comes back.

A server reports new weights slightly before they are attested. A completion that it generated with
them is held until they are. If they turn out to be wrong, it is lost together with the server.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.serving.requests import as_segment, check_generation, unknown_ids_in
from torchtitan.grpo.rollout.serving.server_state import Job, Server
from torchtitan.grpo.types import GenerateRequest, Generation

logger = logging.getLogger(__name__)


class ServersFailing(RuntimeError):
    """Too many requests failed in a row on the servers. The run must stop."""


class GivenBack(ServerError):
    """The server left READY during a request. The completion is generated again as often as needed."""


class Attempts:
    """Sends requests and counts their results. ``num_tokens`` counts tokens of rollouts, not of evaluations.

    ``set_lost`` is called with a URL and a reason if a server's weights must be updated again.
    """

    def __init__(
        self,
        config: Rollout,
        vocab_size: int,
        set_lost: Callable[[str, str], None],
        drops: DropLog,
    ) -> None:
        self._vocab_size = vocab_size
        self._request_timeout = config.request_timeout_seconds
        # A part's end depends on time, so what follows it would not be reproducible.
        self._keeps_parts = not config.deterministic
        self._max_consecutive_failures = config.max_consecutive_failures
        self._set_lost = set_lost
        self._drops = drops
        self._consecutive_failures = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.last_error = ""

    async def run(self, server: Server, job: Job, request: GenerateRequest) -> Generation:
        """Returns a usable answer of attested weights.

        Cancelling this call cancels the request. Raises GivenBack if the server left READY, another
        ServerError if the request failed, and ServersFailing after too many failures in a row.
        """
        attested = server.version
        if attested is None:
            raise GivenBack(f"{server.url} was lost before the request was sent")
        task = asyncio.create_task(self._request(server, job, request))
        server.start_request(task)
        left = server.left()
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()  # this notifies the server
            raise
        if left.done() and (not task.done() or task.cancelled() or task.exception() is not None):
            # The caller that reported the loss handles it.
            raise self._given_back(job, f"{server.url} was lost while it generated a completion")
        try:
            generation = task.result()
            await self._check_versions(server, job, generation, attested, left)
        except GivenBack:
            raise
        except ServerError as error:
            if job.is_cut:
                raise GivenBack(f"{server.url} was cut before it had a token: {error}") from error
            self._record_failure(server, job, error)
            raise
        self._consecutive_failures = 0
        server.failures_in_a_row = 0
        if not job.is_evaluation:
            self.num_tokens += len(generation.token_ids)
            server.num_tokens += len(generation.token_ids)
        if not job.is_cut:
            self._count_short(server, request, generation)
        return generation

    def _given_back(self, job: Job, reason: str) -> GivenBack:
        self.num_failed += not job.is_cut
        return GivenBack(reason)

    def _count_short(
        self, server: Server, request: GenerateRequest, generation: Generation
    ) -> None:
        num_tokens = len(generation.token_ids)
        if generation.finish_reason == "length" and num_tokens < request.max_new_tokens:
            self._drops.record(
                "answer cut",
                f"{server.url} ended a completion after {num_tokens} of {request.max_new_tokens} "
                f"tokens, behind a prompt of {len(request.prompt_ids)} tokens. Start the server "
                "with a larger --max-model-len (--context-length), or lower "
                "prompts.max_prompt_tokens or rollout.max_new_tokens.",
                source=server.url,
            )

    async def _request(self, server: Server, job: Job, request: GenerateRequest) -> Generation:
        try:
            async with asyncio.timeout(self._request_timeout):
                generation = await self._generate(server, request)
        except TimeoutError as error:
            raise ServerError(
                f"{server.url} did not finish a completion of at most {request.max_new_tokens} "
                f"tokens within rollout.request_timeout_seconds = {self._request_timeout:g}."
            ) from error
        if job.is_cut and generation.finish_reason == "abort":
            if not self._keeps_parts:
                raise GivenBack(f"{server.url} was cut while it generated a completion")
            generation = as_segment(generation, request)
        check_generation(generation, request, self._vocab_size, server.url)
        return generation

    async def _generate(self, server: Server, request: GenerateRequest) -> Generation:
        # Unknown ids are excluded only if one was sampled, because it costs time and memory, or
        # with a seed: completions must not depend on what was sampled before.
        if not server.samples_unknown_ids and request.seed is None:
            generation = await server.client.generate(replace(request, unknown_ids=()))
            if not (unknown := unknown_ids_in(generation, request)).size:
                return generation
            server.samples_unknown_ids = True
            logger.warning(
                "%s has sampled the id %d, which is not in the tokenizer. Such ids are excluded there "
                "from now on (docs/servers.md).", server.url, unknown[0],
            )  # fmt: skip
        return await server.client.generate(request)

    async def _check_versions(
        self,
        server: Server,
        job: Job,
        generation: Generation,
        attested: int,
        left: asyncio.Future[None],
    ) -> None:
        versions = [segment.version for segment in generation.segments]
        if job.is_cut:
            newest = server.attested
            assert newest is not None, "only a server that was attested is cut"
            if min(versions) < attested or max(versions) > newest:
                raise GivenBack(f"{server.url} was cut before its newest weights were attested")
            return
        if max(versions) > attested:
            await self._until_attested(server, job, max(versions), left)
        if server.version is not None and min(versions) < attested:
            # The server was restarted. It gets no requests until its weights are attested again.
            self._set_lost(
                server.url,
                f"it generated tokens with version {min(versions)}, not {attested}",
            )

    async def _until_attested(
        self, server: Server, job: Job, newest: int, left: asyncio.Future[None]
    ) -> None:
        deadline = time.monotonic() + self._request_timeout
        while not left.done() and (server.version is None or server.version < newest):
            news = {left, server.next_attestation()}
            seconds = deadline - time.monotonic()
            done, _ = await asyncio.wait(news, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ServerError(
                    f"{server.url} generated tokens with version {newest}, which was not attested "
                    "(the trainer has not confirmed that the server holds these weights) within "
                    f"rollout.request_timeout_seconds = {self._request_timeout:g}."
                )
        if left.done():
            reason = f"{server.url} was lost before version {newest} was attested"
            raise self._given_back(job, reason)

    def _record_failure(self, server: Server, job: Job, error: ServerError) -> None:
        """Counts requests that fail together, as when their server ends, as one failure.

        Only a request that was sent after the last failure shows that the server is still unusable.
        """
        self.num_failed += 1
        self.last_error = str(error)
        self._drops.record_request(server.url, error)
        is_news = job.started_at >= server.last_failure_at
        server.fail(job, is_news=is_news)
        if not is_news:
            return
        self._consecutive_failures += 1
        if self._consecutive_failures >= self._max_consecutive_failures:
            raise ServersFailing(
                f"{self._consecutive_failures} requests for completions failed in a row "
                f"(rollout.max_consecutive_failures = {self._max_consecutive_failures}), "
                f"the last on {server.url}: {error}"
            ) from error
