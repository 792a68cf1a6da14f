# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from local_server import PROMPT, SAMPLING, LocalServer, attested, generation

from torchtitan.grpo.inference.client import ServerLoad
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.spare_slots import SpareSlots
from torchtitan.grpo.types import GenerateRequest, Generation

MOST_ROLLOUTS = 8


class Holding(LocalServer):
    """Answers once it is told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url, self.answer_late)
        self.go_on = asyncio.Event()

    async def answer_late(self, request: GenerateRequest) -> Generation:
        await self.go_on.wait()
        return generation()


@contextlib.asynccontextmanager
async def started(
    names: str = "a", *, max_concurrent: int = 0, **settings: Any
) -> AsyncIterator[tuple[Dispatcher, SpareSlots, list[Holding]]]:
    clients = [Holding(f"http://{name}") for name in names]
    dispatcher = attested(*clients, max_concurrent_rollouts=MOST_ROLLOUTS, **settings)
    yield dispatcher, SpareSlots(dispatcher, max_concurrent, MOST_ROLLOUTS), clients
    await dispatcher.close()


def fill(places: Dispatcher | SpareSlots, limit: int = 99) -> list[asyncio.Task[Generation]]:
    """Starts as many completions as there are places."""
    started = []
    while len(started) < limit and (server := places.choose(lambda version: True)) is not None:
        started.append(places.submit(PROMPT, server, SAMPLING))
    return started


@pytest.mark.parametrize("adaptive", [True, False])
async def test_an_evaluation_takes_what_rollouts_leave_free(adaptive: bool):
    async with started(adaptive_concurrency=adaptive) as (dispatcher, room, clients):
        fill(dispatcher, 3)
        evaluated = fill(room)
        assert len(evaluated) == MOST_ROLLOUTS - 3
        assert (dispatcher.in_flight, dispatcher.in_flight_evaluation) == (3, 5)
        # Of rollouts there are as many as without an evaluation.
        (server,) = dispatcher.servers.values()
        assert server.free_places() == (MOST_ROLLOUTS - 3 if adaptive else float("inf"))
        assert len(fill(dispatcher, 5)) == 5
        assert dispatcher.in_flight == MOST_ROLLOUTS
        clients[0].go_on.set()
        await asyncio.gather(*evaluated)
        await asyncio.sleep(0)
        assert dispatcher.in_flight_evaluation == 0


async def test_a_few_are_always_in_flight_and_never_more_than_allowed():
    async with started(max_concurrent=32) as (dispatcher, room, _):
        fill(dispatcher)
        assert dispatcher.in_flight == MOST_ROLLOUTS
        assert len(fill(room)) == 2  # a sixteenth of 32
    async with started(max_concurrent=3) as (_, room, _):
        assert len(fill(room)) == 3


async def test_a_server_with_a_queue_or_full_memory_gets_none():
    async with started("abc", max_concurrent=8) as (dispatcher, room, _):
        servers = list(dispatcher.servers.values())
        servers[0].report(ServerLoad(running=1, waiting=2, kv_use=None))
        servers[1].report(ServerLoad(running=1, waiting=0, kv_use=0.95))
        fill(room, 1)  # the one that is always allowed
        chosen = set()
        for _ in range(4):
            if (server := room.choose(lambda version: True)) is not None:
                chosen.add(server.url)
                room.submit(PROMPT, server, SAMPLING)
        assert chosen == {"http://c"}


async def test_waiting_completions_of_an_evaluation_do_not_narrow_the_window_of_rollouts():
    async with started() as (dispatcher, room, _):
        (server,) = dispatcher.servers.values()
        assert server.window is not None
        fill(room)
        for _ in range(3):
            server.report(ServerLoad(running=0, waiting=server.num_evaluated, kv_use=None))
        assert server.window.num_cuts == 0
        for _ in range(3):
            server.report(ServerLoad(running=0, waiting=server.num_evaluated + 4, kv_use=None))
        assert server.window.num_cuts == 1


async def test_a_pinned_server_alone_is_asked_until_it_is_gone():
    async with started("ab") as (dispatcher, room, clients):
        room.pin(["http://b"])
        evaluated = fill(room, 3)
        assert {job.is_evaluation for job in dispatcher.servers["http://b"].jobs} == {True}
        assert dispatcher.servers["http://a"].jobs == set()
        assert len(evaluated) == 3
        dispatcher.set_lost("http://b", "gone")
        clients[0].go_on.set()
        await asyncio.gather(*evaluated)  # generated again, by the other one
        assert len(clients[0].requests) == 3
        assert room.choose(lambda version: True) is dispatcher.servers["http://a"]


async def test_evaluations_are_not_counted_as_tokens_of_rollouts():
    async with started("a") as (dispatcher, room, clients):
        (evaluated,) = fill(room, 1)
        clients[0].go_on.set()
        await evaluated
        assert dispatcher.attempts.num_tokens == 0
