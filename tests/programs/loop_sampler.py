# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps completions in flight on all servers, through the real dispatcher and clients."""

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tagged import VOCAB_SIZE

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.types import Generation, Prompt, ServerInfo

_POLL_SECONDS = 0.02
_REQUEST_SECONDS = 20.0


class Sampler:
    def __init__(
        self,
        servers: Sequence[ServerInfo],
        num_requests: int,
        num_tokens: int,
        tell: Callable[..., None],
    ) -> None:
        self._num_requests, self._tell = num_requests, tell
        self._sampling = Sampling(num_tokens, 512, 1.0, 1.0, -1, (), ignore_eos=True)
        self._random = random.Random(7)
        self._numbers = itertools.count()
        self._running: set[asyncio.Task[Any]] = set()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(servers,), name="sampler")
        self._thread.start()
        self._ready.wait(10)

    def set_version(self, url: str, version: int) -> None:
        self._loop.call_soon_threadsafe(self._dispatcher.set_version, url, version)

    def set_lost(self, url: str, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._dispatcher.set_lost, url, reason)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(15)
        assert not self._thread.is_alive(), "the sampler must end"

    def _run(self, servers: Sequence[ServerInfo]) -> None:
        asyncio.run(self._sample(servers))

    async def _sample(self, servers: Sequence[ServerInfo]) -> None:
        self._loop = asyncio.get_running_loop()
        clients = [
            make_client(s.kind, s.url, request_timeout_seconds=_REQUEST_SECONDS) for s in servers
        ]
        self._dispatcher = Dispatcher(
            clients,
            Rollout(
                request_timeout_seconds=_REQUEST_SECONDS,
                max_consecutive_failures=10**9,
                adaptive_concurrency=False,
            ),
            vocab_size=VOCAB_SIZE,
        )
        self._ready.set()
        while not self._stop.is_set():
            for server in self._dispatcher.servers.values():
                while server.is_ready() and server.load < self._num_requests:
                    self._start(server)
            await asyncio.sleep(_POLL_SECONDS)
        await self._dispatcher.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for client in clients:
            await client.close()

    def _start(self, server: Server) -> None:
        ids = np.array([self._random.randrange(2, VOCAB_SIZE) for _ in range(5)], np.int32)
        prompt = Prompt(next(self._numbers), "", ids, {})
        # Submitted here and now: it counts as the server's load from this moment on.
        completion = self._dispatcher.submit(prompt, server, self._sampling)
        task = asyncio.create_task(self._report(prompt, server, completion))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _report(
        self, prompt: Prompt, server: Server, completion: asyncio.Task[Generation]
    ) -> None:
        attested = server.version
        try:
            generation = await completion
        except ServerError:
            return
        self._tell(
            "sample",
            url=server.url,
            attested=attested,
            prompt=prompt.token_ids.tolist(),
            ids=generation.token_ids.tolist(),
            logprobs=generation.logprobs.tolist(),
            segments=[(s.version, s.start, s.end) for s in generation.segments],
        )
