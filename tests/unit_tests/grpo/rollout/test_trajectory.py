# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
from typing import Any

import numpy as np
import pytest
from rollouts import generation
from stub_clients import StubClient

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.trajectory import Trajectory, TrajectoryWriter
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt, VersionSegment

STOP = 1
PROMPT = Prompt(0, "prompt", np.array([7, 9], np.int32), {})
WHOLE = [16, 32, 64, 15, 30, 60, 7, STOP]


def next_token(context: list[int]) -> int:
    """A language model of sorts: depends on all that is before."""
    return STOP if len(context) == len(PROMPT.token_ids) + len(WHOLE) - 1 else sum(context) % 113


class Server(StubClient):
    """Writes token by token, what follows from the whole context; fails when it is told to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.served = 0
        self.contexts: list[int] = []
        self.failures = 0
        self.held: asyncio.Event | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        self.contexts.append(len(request.prompt_ids))
        if self.held is not None:
            await self.held.wait()
        if self.failures:
            self.failures -= 1
            raise ServerError(f"{self.url}: told to fail")
        tokens: list[int] = []
        while len(tokens) < request.max_new_tokens and tokens[-1:] != [STOP]:
            tokens.append(next_token([*request.prompt_ids, *tokens]))
        positions = np.arange(len(tokens)) + len(request.prompt_ids)
        reason = "stop" if tokens[-1] == STOP else "length"
        return generation(tokens, -positions / 100, self.served, finish_reason=reason)


async def write(
    servers: list[Server],
    segment_tokens: int,
    *,
    max_new_tokens: int = 20,
    begun: Generation | None = None,
    meanwhile: Any = None,
) -> Trajectory:
    """``meanwhile`` is a coroutine function of the dispatcher."""
    config = Rollout(request_timeout_seconds=20, segment_tokens=segment_tokens)
    dispatcher = Dispatcher(servers, config, vocab_size=128)
    for server in servers:
        dispatcher.set_version(server.url, 0)
    sampling = Sampling(max_new_tokens, 64, 1.0, 1.0, -1, (STOP,))
    writer = TrajectoryWriter(dispatcher, sampling, config)
    trajectory = writer.start(PROMPT, dispatcher.servers[servers[0].url], begun=begun)
    assert dispatcher.in_flight == 1
    if meanwhile is not None:
        await meanwhile(dispatcher)
    await asyncio.wait({trajectory.task}, timeout=30)
    assert dispatcher.in_flight == 0
    return trajectory


def parts_of(trajectory: Trajectory) -> tuple[list[int], list[float], str]:
    generation = trajectory.result()
    assert generation is not None, trajectory.task.exception()
    logprobs = [round(100 * float(p)) for p in generation.logprobs]
    return generation.token_ids.tolist(), logprobs, generation.finish_reason


@pytest.mark.parametrize("segment_tokens", [0, 1, 3, 8, 100])
async def test_segments_make_up_what_one_request_gives(segment_tokens):
    server = Server("http://a")
    tokens, logprobs, reason = parts_of(await write([server], segment_tokens))
    assert (tokens, reason) == (WHOLE, "stop")
    assert logprobs == [-position for position in range(2, 2 + len(WHOLE))]
    # Each request holds all that was written before it.
    step = segment_tokens or len(WHOLE)
    assert server.contexts == list(range(2, 2 + len(WHOLE), step))


@pytest.mark.parametrize("segment_tokens", [0, 2, 3])
async def test_segments_end_at_the_length_limit(segment_tokens):
    tokens, _, reason = parts_of(
        await write([Server("http://a")], segment_tokens, max_new_tokens=5)
    )
    assert (tokens, reason) == (WHOLE[:5], "length")


async def test_a_completion_that_was_begun_continues():
    begun = generation(WHOLE[:3], [-0.02, -0.03, -0.04], -1, finish_reason="length")
    server = Server("http://a")
    trajectory = await write([server], 4, begun=begun)
    tokens, logprobs, _ = parts_of(trajectory)
    assert (tokens, logprobs) == (WHOLE, [-p for p in range(2, 2 + len(WHOLE))])
    assert server.contexts == [5, 9]
    assert trajectory.task.result().segments == (VersionSegment(-1, 0, 3), VersionSegment(0, 3, 8))


async def test_another_server_continues_the_completion_of_a_lost_one():
    first, second = Server("http://a"), Server("http://b")

    async def lose_first(dispatcher: Dispatcher) -> None:
        while len(first.contexts) < 2:
            await asyncio.sleep(0)
            if len(first.contexts) == 1:
                first.held = asyncio.Event()  # from the second segment on
        dispatcher.set_version(second.url, 3)
        second.served = 3
        dispatcher.set_lost(first.url, "told so")

    trajectory = await write([first, second], 3, meanwhile=lose_first)
    tokens, logprobs, _ = parts_of(trajectory)
    assert (tokens, logprobs) == (WHOLE, [-p for p in range(2, 2 + len(WHOLE))])
    # What was written before is kept, and nobody writes it again.
    assert min(second.contexts) == 5
    assert trajectory.task.result().segments == (VersionSegment(0, 0, 3), VersionSegment(3, 3, 8))


async def test_a_completion_that_no_server_can_continue_fails_and_keeps_its_tokens():
    server = Server("http://a")

    async def fail_later(dispatcher: Dispatcher) -> None:
        while not server.contexts:
            await asyncio.sleep(0)
        server.failures = 2

    trajectory = await write([server], 3, meanwhile=fail_later)
    assert trajectory.result() is None
    assert isinstance(trajectory.task.exception(), ServerError)
