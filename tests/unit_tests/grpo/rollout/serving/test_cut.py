# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A server whose devices are needed: its requests end at once and keep their tokens, and it sleeps."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from local_server import PROMPT, SAMPLING, LocalServer, attested, generation, make, submit

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import ServerError, ServerLoad
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.serving import dispatcher as dispatcher_module
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.server_state import Patience, Server
from torchtitan.grpo.rollout.serving.spare_slots import SpareSlots
from torchtitan.grpo.rollout.trajectory import TrajectoryWriter
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt

A, B = "http://a", "http://b"


class Interrupted(LocalServer):
    """Writes the number of each token's place until it is aborted, ``num_tokens`` at most by then."""

    def __init__(self, url: str, num_tokens: int = 3, version: int = 0) -> None:
        super().__init__(url, self.write)
        self.num_tokens, self.version = num_tokens, version
        self.aborts, self.is_cut = 0, asyncio.Event()
        self.is_deaf = self.is_stuck = False

    async def write(self, request: GenerateRequest) -> Generation:
        await self.is_cut.wait()
        if self.num_tokens == 0:
            raise ServerError(f"{self.url}: must have 1 to 7 tokens, got 0")
        return self.part(request, self.num_tokens, "abort")

    def part(self, request: GenerateRequest, num_tokens: int, reason: Any) -> Generation:
        places = np.arange(num_tokens, dtype=np.int32) + len(request.prompt_ids) + 10
        part = replace(generation(self.version, num_tokens), finish_reason=reason)
        return replace(part, token_ids=places, logprobs=-places.astype(np.float32))

    async def finish(self, request: GenerateRequest) -> Generation:
        return self.part(request, request.max_new_tokens, "length")

    async def abort(self, request_id: str | None) -> None:
        assert request_id is None
        self.aborts += 1
        if self.is_stuck:
            await asyncio.Event().wait()
        if self.is_deaf:
            raise ServerError(f"{self.url}: no connection")
        self.is_cut.set()


async def in_flight(server: LocalServer, dispatcher: Dispatcher, number: int = 1) -> list[Any]:
    tasks = [submit(dispatcher, server.url) for _ in range(number)]
    while len(server.requests) < number:
        await asyncio.sleep(0)
    return tasks


async def test_requests_of_a_cut_server_are_answered_with_the_tokens_that_they_have():
    server, drops = Interrupted(A), DropLog()
    config = Rollout(max_concurrent_rollouts=8, max_consecutive_failures=1)
    dispatcher = Dispatcher([server], config, vocab_size=100, drops=drops)
    dispatcher.set_version(A, 0)
    tasks = await in_flight(server, dispatcher, 4)
    state = dispatcher.servers[A]
    assert state.window is not None
    size = state.window.size
    assert await dispatcher.cut(A) == 4
    for part in await asyncio.gather(*tasks):
        assert (part.finish_reason, part.token_ids.tolist()) == ("length", [13, 14, 15])
    assert (dispatcher.attempts.num_failed, dispatcher.num_cut) == (0, 4)
    assert dispatcher.attempts.num_tokens == 12 and dispatcher.attempts.last_error == ""
    assert (state.window.size, state.window.num_cuts, state.retry_at) == (size, 0, 0.0)
    assert state.tokens_per_second == 0.0, "parts are no completions"
    assert not drops.counts
    assert dispatcher.in_flight == state.load == 0 and not state.is_ready()
    assert await dispatcher.cut(A) == await dispatcher.cut("http://gone") == 0
    dispatcher.admit(A)
    dispatcher.set_version(A, 1)
    assert state.is_ready()


def one_more(server: Interrupted) -> None:
    """The server has been given weights that nobody has attested yet."""
    server.version = 1


def older(server: Interrupted) -> None:
    """The server was restarted, which nobody has noticed yet."""
    server.version = -1


def deaf(server: Interrupted) -> None:
    server.is_deaf = True


def stuck(server: Interrupted) -> None:
    server.is_stuck = True


def without_tokens(server: Interrupted) -> None:
    server.num_tokens = 0


@pytest.mark.parametrize("change", [one_more, older, deaf, stuck, without_tokens])
async def test_what_a_cut_server_does_not_answer_is_generated_again_and_is_no_failure(
    change: Callable[[Interrupted], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatcher_module, "_CUT_SECONDS", 0.3)
    monkeypatch.setattr(dispatcher_module, "_CUT_AGAIN_SECONDS", 0.1)
    server, other = Interrupted(A), LocalServer(B)
    change(server)
    dispatcher = attested(server, other, max_consecutive_failures=1, request_timeout_seconds=1000.0)
    tasks = await in_flight(server, dispatcher, 3)
    await asyncio.wait_for(dispatcher.cut(A), 30)
    dispatcher.admit(A)
    dispatcher.set_version(A, 0)  # at once, and it answers now
    server.answer = server.succeed
    assert [len(whole.token_ids) for whole in await asyncio.gather(*tasks)] == [4, 4, 4]
    assert len(server.requests) + len(other.requests) == 6
    assert dispatcher.attempts.num_failed == 0 and dispatcher.num_cut == 3
    assert (server.aborts > 1) == server.is_deaf
    assert not dispatcher.servers[A].requests


async def test_a_reproducible_completion_is_generated_again_with_its_random_numbers():
    server, other = Interrupted(A), LocalServer(B)
    dispatcher = attested(server, other, deterministic=True)
    seeded = replace(SAMPLING, seed=5)
    task = dispatcher.submit(PROMPT, dispatcher.servers[A], seeded)
    while not server.requests:
        await asyncio.sleep(0)
    await dispatcher.cut(A)
    await task
    again = replace(other.requests[0], request_id=server.requests[0].request_id)
    assert again == server.requests[0] and again.seed == 5


async def test_a_token_that_ends_the_completion_ends_it_also_if_it_was_aborted():
    server = Interrupted(A)
    dispatcher = attested(server)
    sampling = replace(SAMPLING, stop_token_ids=(15,))
    task = dispatcher.submit(PROMPT, dispatcher.servers[A], sampling)
    while not server.requests:
        await asyncio.sleep(0)
    await dispatcher.cut(A)
    assert (await task).finish_reason == "stop"


async def test_news_bring_no_new_requests_from_a_cut_on_until_the_server_is_admitted():
    server = Interrupted(A)
    dispatcher = attested(server)
    (task,) = await in_flight(server, dispatcher)
    server.is_deaf = True
    cutting = asyncio.create_task(dispatcher.cut(A))
    while not server.aborts:
        await asyncio.sleep(0)
    dispatcher.set_version(A, 1)
    assert dispatcher.choose(lambda version: True) is None
    server.is_cut.set()
    await asyncio.gather(cutting, task)
    dispatcher.set_version(A, 1)
    assert dispatcher.choose(lambda version: True) is None
    dispatcher.admit(A)
    await dispatcher.cut(A)  # before it is attested
    dispatcher.set_version(A, 1)
    assert dispatcher.choose(lambda version: True) is None


async def test_an_abort_without_a_cut_is_a_failure_as_before():
    server = Interrupted(A)
    dispatcher = attested(server)
    (task,) = await in_flight(server, dispatcher)
    server.is_cut.set()
    with pytest.raises(ServerError, match="aborted after 3 tokens"):
        await task
    assert dispatcher.attempts.num_failed == 2


@pytest.mark.parametrize("is_evaluation", [False, True])
async def test_writers_go_on_where_a_cut_has_ended(is_evaluation: bool):
    server, other = Interrupted(A), Interrupted(B)
    other.answer = other.finish
    dispatcher = make(server, other)
    dispatcher.set_version(A, 0)
    places = SpareSlots(dispatcher, 8, 8) if is_evaluation else dispatcher
    writer = TrajectoryWriter(places, SAMPLING, Rollout())
    trajectories = [
        writer.start(Prompt(i, "abc", PROMPT.token_ids, {}), dispatcher.servers[A])
        for i in range(4)
    ]
    while len(server.requests) < 4:
        await asyncio.sleep(0)
    await dispatcher.cut(A)
    dispatcher.set_asleep(A)
    dispatcher.set_version(B, 2)
    other.version = 2
    for trajectory in trajectories:
        whole = await trajectory.task
        assert whole.token_ids.tolist() == list(range(13, 20))
        assert whole.logprobs.tolist() == [-float(place) for place in range(13, 20)]
        assert [tuple(segment) for segment in whole.segments] == [(0, 0, 3), (2, 3, 7)]
    assert {len(request.prompt_ids) for request in other.requests} == {6}


async def test_a_completion_that_waits_outlasts_the_sleep_of_all_servers_but_not_their_loss():
    server, other = Interrupted(A, num_tokens=0), LocalServer(B)
    dispatcher = attested(server, other, request_timeout_seconds=0.3)
    (task,) = await in_flight(server, dispatcher)
    dispatcher.set_down(B, "its process has ended")
    await dispatcher.cut(A)
    dispatcher.set_asleep(A)
    assert dispatcher.servers[A].state == "asleep"
    _, pending = await asyncio.wait({task}, timeout=1.0)
    assert pending
    dispatcher.admit(A)
    dispatcher.set_lost(A, "it does not wake up")
    assert dispatcher.servers[A].state == "lost"
    with pytest.raises(ServerError, match=r"request_timeout_seconds = 0\.3"):
        await task


def test_patience_counts_the_seconds_in_which_a_server_may_come():
    now = 0.0
    asleep, waiting, ended, replaced = (Server(LocalServer(A)) for _ in range(4))
    asleep.is_asleep, ended.is_down = True, True
    replaced.is_cut, replaced.is_down = True, True  # it starts when it gets its devices
    patience = Patience(10.0, lambda: now)
    for seconds, servers, has_ended in [
        (9.0, [waiting], False),
        (50.0, [asleep], False),
        (50.0, [asleep, ended], False),
        (50.0, [replaced, ended], False),
        (0.5, [asleep, waiting], False),
        (0.4, [], False),
        (0.2, [ended], True),
    ]:
        now += seconds
        assert patience.has_ended(servers) == has_ended


async def test_a_server_that_falls_asleep_uncut_gives_its_requests_to_others():
    server, other = Interrupted(A), LocalServer(B)
    dispatcher = attested(server, other, max_consecutive_failures=1)
    tasks = await in_flight(server, dispatcher, 2)
    dispatcher.set_asleep(A)
    assert [len(whole.token_ids) for whole in await asyncio.gather(*tasks)] == [4, 4]
    assert len(other.requests) == 2 and dispatcher.attempts.num_failed == 0


async def test_a_server_is_asked_for_its_load_while_it_is_awake():
    class Loaded(LocalServer):
        async def load(self) -> ServerLoad:
            asked.append(self.url)
            return ServerLoad(0, 0)

    asked = list[str]()
    dispatcher = attested(Loaded(A), Loaded(B))
    dispatcher.set_asleep(A)
    for url in (B, A):
        watching = asyncio.create_task(dispatcher.watch_loads())
        async with asyncio.timeout(30):
            while url not in asked:
                await asyncio.sleep(0)
        assert asked[0] == B
        watching.cancel()
        dispatcher.set_version(A, 1)
        assert dispatcher.servers[A].state == "ready"


async def test_sleeping_servers_keep_their_part_of_the_concurrency_and_lost_ones_do_not():
    servers = [LocalServer(url) for url in (A, B, "http://c")]
    dispatcher = attested(*servers, max_concurrent_rollouts=24)

    def sizes() -> list[int]:
        return [state.window.size for state in dispatcher.servers.values() if state.window]

    assert sizes() == [8, 8, 8]
    await dispatcher.cut(A)
    assert sizes() == [8, 8, 8]
    dispatcher.set_asleep(A)
    assert sizes() == [8, 8, 8]
    dispatcher.set_down(B, "its process has ended")
    assert sizes() == [8, 8, 12]
