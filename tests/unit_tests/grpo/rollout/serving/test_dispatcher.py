# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests to servers in this process that fail on demand: what is tried again, and where."""

import asyncio
import random
from dataclasses import replace

import pytest
from local_server import PROMPT, SAMPLING, LocalServer, attested, generation, in_loop, make, submit

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, ServersFailing
from torchtitan.grpo.types import GenerateRequest, Generation, VersionSegment


def test_server_gets_work_only_after_it_was_attested():
    dispatcher = make(LocalServer("http://a"), LocalServer("http://b"))
    assert dispatcher.choose(lambda version: True) is None
    dispatcher.set_version("http://b", 3)
    chosen = dispatcher.choose(lambda version: version == 3)
    assert chosen is dispatcher.servers["http://b"]
    assert dispatcher.choose(lambda version: version > 3) is None
    dispatcher.set_lost("http://b", "gone")
    assert dispatcher.choose(lambda version: True) is None


@in_loop
async def test_least_loaded_server_is_chosen_and_load_counts_at_once():
    dispatcher = attested(LocalServer("http://a"), LocalServer("http://b"))
    first = dispatcher.choose(lambda version: True)
    assert first is not None
    task = dispatcher.submit(PROMPT, first, SAMPLING)
    assert dispatcher.in_flight == 1
    assert dispatcher.choose(lambda version: True) is not first
    await task
    await asyncio.sleep(0)  # the load is given back by a callback of the task
    assert dispatcher.in_flight == 0


@in_loop
async def test_requests_fit_the_row_and_no_id_is_the_beginning_of_another():
    server = LocalServer("http://a")
    dispatcher = attested(server)
    await asyncio.gather(*(submit(dispatcher, "http://a") for _ in range(12)))
    assert {request.max_new_tokens for request in server.requests} == {7}
    ids = [request.request_id for request in server.requests]
    assert len(set(ids)) == 12
    assert not any(a != b and b.startswith(a) for a in ids for b in ids)


@in_loop
async def test_failed_request_is_tried_on_another_server():
    bad, good = LocalServer("http://bad"), LocalServer("http://good")
    bad.answer = bad.fail
    dispatcher = attested(bad, good)
    await submit(dispatcher, "http://bad")
    assert (len(bad.requests), len(good.requests)) == (1, 1)
    assert dispatcher.num_failed_requests == 1
    assert not dispatcher.servers["http://bad"].is_ready()


@in_loop
async def test_failed_request_is_not_retried_on_a_server_with_older_weights():
    bad, old = LocalServer("http://bad"), LocalServer("http://old")
    bad.answer = bad.fail
    dispatcher = make(bad, old)
    dispatcher.set_version("http://bad", 5)
    dispatcher.set_version("http://old", 4)
    with pytest.raises(ServerError, match="http://bad: broken"):
        await submit(dispatcher, "http://bad")
    assert (len(bad.requests), len(old.requests)) == (2, 0)


@in_loop
async def test_failures_in_a_row_stop_the_run_and_name_the_server():
    server = LocalServer("http://a")
    server.answer = server.fail
    dispatcher = attested(server, max_consecutive_failures=2)
    with pytest.raises(
        ServersFailing,
        match=r"2 requests for completions failed in a row .* http://a: .*broken",
    ):
        await submit(dispatcher, "http://a")


@in_loop
async def test_burst_of_requests_that_die_together_counts_as_one_failure():
    server = LocalServer("http://a")
    broken = asyncio.Event()
    first_tries = 20

    async def die_together(request: GenerateRequest) -> Generation:
        if len(server.requests) > first_tries:
            return generation()
        if len(server.requests) == first_tries:
            broken.set()
        await broken.wait()
        raise ServerError("http://a: connection lost")

    server.answer = die_together
    dispatcher = attested(server, max_consecutive_failures=2)
    home = dispatcher.servers["http://a"]
    tasks = [dispatcher.submit(PROMPT, home, SAMPLING) for _ in range(first_tries)]
    assert len(await asyncio.gather(*tasks)) == first_tries
    assert dispatcher.num_failed_requests == first_tries


@in_loop
async def test_requests_on_a_lost_server_are_given_up_at_once():
    server, other = LocalServer("http://a"), LocalServer("http://b")
    server.answer = server.hang
    dispatcher = attested(server, other)
    task = submit(dispatcher, "http://a")
    while not server.requests:
        await asyncio.sleep(0)
    dispatcher.set_version("http://b", 0)
    dispatcher.set_lost("http://a", "its update timed out")
    await task
    assert len(other.requests) == 1


async def in_flight_on(server: LocalServer, dispatcher: Dispatcher) -> asyncio.Task[Generation]:
    """A completion that the server is writing, and will not end."""
    server.answer = server.hang
    dispatcher.set_version(server.url, 3)
    task = submit(dispatcher, server.url)
    while not server.requests:
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("end", ["remove", "set_lost", "set_down"])
@in_loop
async def test_what_a_server_had_waits_for_one_that_is_not_older(end: str):
    server, other = LocalServer("http://a"), LocalServer("http://b")
    dispatcher = make(server, other)
    dispatcher.set_version("http://b", 2)
    task = await in_flight_on(server, dispatcher)
    if end == "remove":
        dispatcher.remove("http://a")
    else:
        getattr(dispatcher, end)("http://a", "gone")
    await asyncio.sleep(0.2)
    assert not task.done()
    assert dispatcher.in_flight == 1
    assert not other.requests
    dispatcher.set_version("http://b", 3)
    await task
    await asyncio.sleep(0)
    assert (dispatcher.in_flight, dispatcher.servers["http://b"].load) == (0, 0)


@in_loop
async def test_completion_that_is_given_back_again_and_again_is_not_failed():
    server = LocalServer("http://a")
    dispatcher = make(server, max_consecutive_failures=1)
    task = await in_flight_on(server, dispatcher)
    for num_requests in range(2, 6):
        dispatcher.set_lost("http://a", "its update timed out")
        dispatcher.set_version("http://a", 3)
        while len(server.requests) < num_requests:
            await asyncio.sleep(0)
    server.answer = server.succeed
    dispatcher.set_lost("http://a", "its update timed out")
    dispatcher.set_version("http://a", 3)
    await task
    ids = [request.request_id for request in server.requests]
    assert len(set(ids)) == len(ids) == 6


@in_loop
async def test_completion_that_nobody_takes_fails_at_its_timeout():
    server = LocalServer("http://a")
    dispatcher = make(server, request_timeout_seconds=0.3)
    task = await in_flight_on(server, dispatcher)
    dispatcher.remove("http://a")
    with pytest.raises(
        ServerError, match=r"No server of policy_version 3 .* = 0\.3\. The previous attempt"
    ):
        await task
    assert dispatcher.in_flight == 0


@in_loop
async def test_removed_server_is_not_waited_for_while_it_is_told():
    frozen, other = LocalServer("http://a"), LocalServer("http://b")
    dispatcher = make(frozen, other)
    answers_again = asyncio.Event()

    async def freeze(request: GenerateRequest) -> Generation:
        try:
            return await LocalServer.hang(frozen, request)
        except asyncio.CancelledError:
            await answers_again.wait()  # the abort is not answered either
            raise

    frozen.hang = freeze  # type: ignore[method-assign]
    task = await in_flight_on(frozen, dispatcher)
    dispatcher.set_version("http://b", 3)
    (told,) = dispatcher.remove("http://a")
    await task
    assert len(other.requests) == 1
    assert not told.done()
    answers_again.set()
    await asyncio.wait([told], timeout=20)
    assert told.cancelled()


@in_loop
async def test_late_news_of_servers_that_are_not_there_is_harmless():
    dispatcher = make(LocalServer("http://a"), LocalServer("http://b"))
    dispatcher.remove("http://a")
    dispatcher.set_version("http://a", 3)
    dispatcher.set_lost("http://a", "late")
    dispatcher.set_down("http://b", "its process has ended")
    dispatcher.set_version("http://b", 3)
    assert dispatcher.choose(lambda version: True) is None
    # The same URL again: another server, which must be attested itself.
    dispatcher.add(LocalServer("http://a"))
    dispatcher.set_running("http://b")
    assert dispatcher.choose(lambda version: True) is None
    for url in ("http://a", "http://b"):
        dispatcher.set_version(url, 4)
        assert dispatcher.servers[url].is_ready()


@in_loop
async def test_cancelled_completion_cancels_its_request():
    server = LocalServer("http://a")
    cancelled = asyncio.Event()

    async def hang(request: GenerateRequest) -> Generation:
        try:
            return await server.hang(request)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server.answer = hang
    dispatcher = attested(server)
    task = submit(dispatcher, "http://a")
    while not server.requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(cancelled.wait(), 5)


@in_loop
async def test_request_without_an_answer_fails_at_its_timeout():
    server = LocalServer("http://a")
    server.answer = server.hang
    dispatcher = attested(server, request_timeout_seconds=0.05)
    with pytest.raises(ServerError, match=r"rollout.request_timeout_seconds = 0.05"):
        await submit(dispatcher, "http://a")


class FlakyServer(LocalServer):
    """Answers at once, late, with an error or never, under the version it has."""

    def __init__(self, url: str, rng: random.Random) -> None:
        super().__init__(url)
        self.rng, self.served, self.running = rng, 0, 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.running += 1
        try:
            first = self.served
            draw = self.rng.random()
            if draw < 0.05:
                await asyncio.get_running_loop().create_future()
            elif draw < 0.2:
                await asyncio.sleep(0.1)
            else:
                for _ in range(self.rng.randrange(20)):
                    await asyncio.sleep(0)
            if draw > 0.95:
                raise ServerError(f"{self.url}: unlucky")
            segments = (VersionSegment(first, 0, 1), VersionSegment(self.served, 1, 4))
            return replace(generation(), segments=segments)
        finally:
            self.running -= 1


@pytest.mark.parametrize("seed", range(3))
@in_loop
async def test_whatever_servers_do_each_completion_ends_once_and_nothing_is_left(seed: int):
    rng = random.Random(seed)
    servers = [FlakyServer(f"http://{i}", rng) for i in range(3)]
    dispatcher = make(
        *servers,
        request_timeout_seconds=0.5,
        max_consecutive_failures=10**6,
        max_concurrent_rollouts=24,
        group_size=2,
        hedge_seconds=0.02,
    )
    for server in servers:
        dispatcher.set_version(server.url, 0)
    tasks: list[tuple[asyncio.Task[Generation], int]] = []
    while len(tasks) < 300 or dispatcher.num_hedges_won == 0:
        # At least eight of the places are left to hedges.
        while dispatcher.in_flight >= 16 or (home := dispatcher.choose(lambda v: True)) is None:
            await asyncio.sleep(0.001)
        assert home.version is not None
        prompt = replace(PROMPT, group_id=len(tasks) // 2)
        task = dispatcher.submit(prompt, home, SAMPLING)
        tasks.append((task, home.version))
        if rng.random() < 0.05:
            task.cancel()
        if rng.random() < 0.1:
            moved = rng.choice(servers)
            if rng.random() < 0.3:
                dispatcher.set_lost(moved.url, "unlucky")
            moved.served += 1
            dispatcher.set_version(moved.url, moved.served)
    results = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
    for result, (_, floor) in zip(results, tasks, strict=True):
        if isinstance(result, Generation):
            assert min(segment.version for segment in result.segments) >= floor
        else:
            assert isinstance(result, ServerError | asyncio.CancelledError)
    assert sum(isinstance(result, Generation) for result in results) > 200
    while dispatcher.in_flight or any(s.requests for s in dispatcher.servers.values()):
        await asyncio.sleep(0.001)
    assert [server.load for server in dispatcher.servers.values()] == [0, 0, 0]
    assert [server.running for server in servers] == [0, 0, 0]
