# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests to servers in this process that fail on demand: what is tried again, and where."""

import asyncio
import random
from dataclasses import replace

import pytest
from local_server import PROMPT, SAMPLING, LocalServer, attested, generation, make, submit

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.rollout.serving import server_state
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, ServersFailing
from torchtitan.grpo.types import GenerateRequest, Generation, VersionSegment


def servers_named(names: str) -> list[LocalServer]:
    return [LocalServer(f"http://{name}") for name in names]


async def until_asked(server: LocalServer, num_requests: int = 1) -> None:
    while len(server.requests) < num_requests:
        await asyncio.sleep(0)


async def in_flight_on(server: LocalServer, dispatcher: Dispatcher) -> asyncio.Task[Generation]:
    """A completion that the server is writing, and will not end."""
    server.answer = server.hang
    dispatcher.set_version(server.url, 3)
    task = submit(dispatcher, server.url)
    await until_asked(server)
    return task


def test_server_gets_work_only_after_it_was_attested():
    dispatcher = make(*servers_named("ab"))
    assert dispatcher.choose(lambda version: True) is None
    dispatcher.set_version("http://b", 3)
    chosen = dispatcher.choose(lambda version: version == 3)
    assert chosen is dispatcher.servers["http://b"]
    assert dispatcher.choose(lambda version: version > 3) is None
    dispatcher.set_lost("http://b", "gone")
    assert dispatcher.choose(lambda version: True) is None


def test_an_episode_that_is_about_to_ask_keeps_a_place_on_its_server():
    dispatcher = attested(*servers_named("ab"))
    first, second = dispatcher.servers.values()
    with dispatcher.hold(first):
        assert dispatcher.choose(lambda version: True) is second
        assert (dispatcher.in_flight, first.load) == (1, 1)
    assert (dispatcher.in_flight, first.load) == (0, 0)


async def test_who_waits_for_a_server_hears_at_once_when_one_is_attested():
    dispatcher = make(*servers_named("ab"))
    for version, name in enumerate("ab"):
        waiting = asyncio.create_task(dispatcher.until_attested(60.0))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "an earlier version is no news"
        dispatcher.set_version(f"http://{name}", version)
        await asyncio.wait_for(waiting, 10.0)


async def test_requests_fit_the_row_and_no_id_is_the_beginning_of_another():
    (server,) = servers_named("a")
    dispatcher = attested(server)
    await asyncio.gather(*(submit(dispatcher, "http://a") for _ in range(12)))
    assert {request.max_new_tokens for request in server.requests} == {7}
    ids = [request.request_id for request in server.requests]
    assert len(set(ids)) == 12
    assert not any(a != b and b.startswith(a) for a in ids for b in ids)


async def test_failed_request_is_tried_once_more_but_not_on_a_server_with_older_weights():
    bad, other = servers_named("ab")
    bad.answer = bad.fail
    dispatcher = attested(bad, other)
    await submit(dispatcher, "http://a")
    assert (len(bad.requests), len(other.requests)) == (1, 1)
    assert dispatcher.attempts.num_failed == 1
    assert not dispatcher.servers["http://a"].is_ready()

    dispatcher = make(bad, other)
    dispatcher.set_version("http://a", 5)
    dispatcher.set_version("http://b", 4)
    with pytest.raises(ServerError, match="http://a: broken"):
        await submit(dispatcher, "http://a")
    assert (len(bad.requests), len(other.requests)) == (3, 1)


async def test_failures_in_a_row_stop_the_run_and_name_the_server():
    (server,) = servers_named("a")
    server.answer = server.fail
    dispatcher = attested(server, max_consecutive_failures=2)
    message = r"2 requests for completions failed in a row .* http://a: .*broken"
    with pytest.raises(ServersFailing, match=message):
        await submit(dispatcher, "http://a")


async def test_requests_that_die_together_are_one_failure_and_are_all_tried_again():
    (server,) = servers_named("a")
    broken, first_tries = asyncio.Event(), 20

    async def die_together(request: GenerateRequest) -> Generation:
        if len(server.requests) > first_tries:
            return generation()
        if len(server.requests) == first_tries:
            broken.set()
        await broken.wait()
        raise ServerError("http://a: connection lost")

    server.answer = die_together
    dispatcher = attested(
        server, max_consecutive_failures=2, max_concurrent_rollouts=first_tries, group_size=2
    )
    tasks = [submit(dispatcher, "http://a") for _ in range(first_tries)]
    assert len(await asyncio.gather(*tasks)) == first_tries
    assert dispatcher.attempts.num_failed == first_tries
    window = dispatcher.servers["http://a"].window
    assert window is not None and window.num_cuts == 1 and window.size < first_tries


@pytest.mark.parametrize("end", ["remove", "set_lost", "set_down"])
async def test_what_a_server_had_waits_for_one_that_is_not_older(end: str):
    server, other = servers_named("ab")
    dispatcher = make(server, other)
    dispatcher.set_version("http://b", 2)
    task = await in_flight_on(server, dispatcher)
    getattr(dispatcher, end)("http://a", *([] if end == "remove" else ["gone"]))
    await asyncio.sleep(0.2)
    assert not task.done()
    assert dispatcher.in_flight == 1
    assert not other.requests
    dispatcher.set_version("http://b", 3)
    await task
    await asyncio.sleep(0)
    assert (dispatcher.in_flight, dispatcher.servers["http://b"].load) == (0, 0)


async def test_completion_that_is_given_back_again_and_again_is_not_failed():
    (server,) = servers_named("a")
    dispatcher = make(server, max_consecutive_failures=1)
    task = await in_flight_on(server, dispatcher)
    for num_requests in range(2, 7):
        if num_requests == 6:
            server.answer = server.succeed
        dispatcher.set_lost("http://a", "its update timed out")
        dispatcher.set_version("http://a", 3)
        await until_asked(server, num_requests)
    await task
    ids = [request.request_id for request in server.requests]
    assert len(set(ids)) == len(ids) == 6


@pytest.mark.parametrize(
    ("num_failed", "error", "num_requests"),
    [
        (7, RouteError("Server disconnected"), 8),
        (8, RouteError("Server disconnected"), 8),
        (2, RouteError("answered 503", 503), 2),
        (2, ServerError("timed out"), 2),
    ],
)
async def test_request_whose_connection_fails_is_sent_more_often(
    monkeypatch: pytest.MonkeyPatch, num_failed: int, error: ServerError, num_requests: int
):
    monkeypatch.setattr(server_state, "_FIRST_BACKOFF_SECONDS", 1e-4)
    (server,) = servers_named("a")
    dispatcher = attested(server)

    async def fail_first(request: GenerateRequest) -> Generation:
        if len(server.requests) > num_failed:
            return await server.succeed(request)
        raise error

    server.answer = fail_first
    (found,) = await asyncio.gather(submit(dispatcher, server.url), return_exceptions=True)
    assert len(server.requests) == num_requests
    assert (found is error) == (num_requests == num_failed)


@pytest.mark.parametrize(
    ("is_removed", "message"),
    [
        (True, r"No server of policy_version 3 .* = 0\.3\. The previous attempt"),
        (False, r"rollout.request_timeout_seconds = 0\.3"),
    ],
)
async def test_completion_that_nobody_answers_fails_at_its_timeout(is_removed: bool, message: str):
    (server,) = servers_named("a")
    dispatcher = make(server, request_timeout_seconds=0.3)
    task = await in_flight_on(server, dispatcher)
    if is_removed:
        dispatcher.remove("http://a")
    with pytest.raises(ServerError, match=message):
        await task
    assert dispatcher.in_flight == 0


class Frozen(LocalServer):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answers_again = asyncio.Event()

    async def hang(self, request: GenerateRequest) -> Generation:
        try:
            return await super().hang(request)
        except asyncio.CancelledError:
            await self.answers_again.wait()  # the abort is not answered either
            raise


async def test_a_completion_does_not_wait_until_a_frozen_server_has_heard_of_its_timeout():
    frozen, other = Frozen("http://a"), LocalServer("http://b")
    dispatcher = make(frozen, other, request_timeout_seconds=0.3)
    task = await in_flight_on(frozen, dispatcher)
    dispatcher.set_version("http://b", 3)
    (told,) = dispatcher.servers["http://a"].requests
    await asyncio.wait_for(task, 20)
    assert len(other.requests) == 1 and dispatcher.attempts.num_failed == 1
    assert not told.done()
    frozen.answers_again.set()
    await asyncio.wait([told], timeout=20)
    assert told.cancelled()


def test_a_server_that_does_not_say_its_load_gets_no_work_while_another_one_does():
    dispatcher = attested(*servers_named("ab"))
    silent, other = dispatcher.servers.values()
    silent.is_silent = True
    assert dispatcher.choose(lambda version: True, prefer="http://a") is other
    # Unless it is the only one that may, as the one that serves a version to evaluate.
    assert dispatcher.ready(lambda version: True, lambda server: server is silent) == [silent]
    other.is_silent = True
    assert dispatcher.choose(lambda version: True, prefer="http://a") is silent


@pytest.mark.parametrize("sign", ["a completion", "an attestation"])
def test_a_server_that_gives_a_sign_of_life_is_not_silent(sign: str):
    dispatcher = attested(*servers_named("a"))
    (server,) = dispatcher.servers.values()
    server.is_silent = True
    if sign == "a completion":
        server.end_job(server.begin_job(4.0), 4)
    else:
        dispatcher.set_version(server.url, 1)
    assert not server.is_silent


async def test_removed_server_is_not_waited_for_while_it_is_told():
    frozen, other = Frozen("http://a"), LocalServer("http://b")
    dispatcher = make(frozen, other)
    task = await in_flight_on(frozen, dispatcher)
    dispatcher.set_version("http://b", 3)
    (told,) = dispatcher.remove("http://a")
    await task
    assert len(other.requests) == 1
    assert not told.done()
    frozen.answers_again.set()
    await asyncio.wait([told], timeout=20)
    assert told.cancelled()


async def test_late_news_of_servers_that_are_not_there_is_harmless():
    dispatcher = make(*servers_named("ab"))
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


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_servers_do_each_completion_ends_once_and_nothing_is_left(seed: int):
    rng = random.Random(seed)
    servers = [FlakyServer(f"http://{i}", rng) for i in range(3)]
    dispatcher = attested(
        *servers, request_timeout_seconds=0.5, group_size=2,
        max_consecutive_failures=10**6, max_concurrent_rollouts=24,
    )  # fmt: skip
    tasks: list[tuple[asyncio.Task[Generation], int]] = []
    while len(tasks) < 300:
        while dispatcher.in_flight >= 16 or (home := dispatcher.choose(lambda v: True)) is None:
            await asyncio.sleep(0.001)
        assert home.version is not None
        prompt = replace(PROMPT, group_id=len(tasks) // 2)
        tasks.append((dispatcher.submit(prompt, home, SAMPLING), home.version))
        if rng.random() < 0.05:
            tasks[-1][0].cancel()
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
