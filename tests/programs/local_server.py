# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Servers in the process of a test, which generate alone, and a dispatcher for them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from stub_clients import StubClient

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt, VersionSegment

SAMPLING = Sampling(8, 10, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(1,))
PROMPT = Prompt(0, "abc", np.arange(3, dtype=np.int32), {})
Answer = Callable[[GenerateRequest], Awaitable[Generation]]


def generation(version: int = 0, num_tokens: int = 4) -> Generation:
    return Generation(
        token_ids=np.ones(num_tokens, np.int32),
        logprobs=-np.ones(num_tokens, np.float32),
        finish_reason="stop",
        segments=(VersionSegment(version, 0, num_tokens),),
    )


class LocalServer(StubClient):
    def __init__(self, url: str, answer: Answer | None = None) -> None:
        self.url = url
        self.requests: list[GenerateRequest] = []
        self.answer = answer or self.succeed

    async def succeed(self, request: GenerateRequest) -> Generation:
        return generation()

    async def fail(self, request: GenerateRequest) -> Generation:
        raise ServerError(f"{self.url}: broken")

    async def hang(self, request: GenerateRequest) -> Generation:
        return await asyncio.get_running_loop().create_future()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        return await self.answer(request)


def make(*servers: LocalServer, **settings: Any) -> Dispatcher:
    group_size = settings.pop("group_size", 1)
    is_bounded = "max_concurrent_rollouts" in settings
    defaults = {"request_timeout_seconds": 20.0, "adaptive_concurrency": is_bounded}
    config = Rollout(**{**defaults, **settings})
    return Dispatcher(servers, config, vocab_size=100, group_size=group_size)


def attested(*servers: LocalServer, **settings: Any) -> Dispatcher:
    dispatcher = make(*servers, **settings)
    for server in servers:
        dispatcher.set_version(server.url, 0)
    return dispatcher


def submit(dispatcher: Dispatcher, url: str) -> asyncio.Task[Generation]:
    return dispatcher.submit(PROMPT, dispatcher.servers[url], SAMPLING)


async def end(tasks: list[asyncio.Task[Generation]], dispatcher: Dispatcher) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert dispatcher.in_flight == 0
    assert [server.load for server in dispatcher.servers.values()] == [0] * len(dispatcher.servers)
