# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Dispatch and producer against servers in this process that fail on demand."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.inference.client import InferenceClient, ServerError, ServerLoad
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, ServersFailing
from torchtitan.grpo.rollout.serving.requests import Sampling, check_generation
from torchtitan.grpo.rollout.serving.server_state import Job
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt, VersionSegment

SAMPLING = Sampling(
    max_new_tokens=8,
    max_total_tokens=10,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    stop_token_ids=(1,),
)
PROMPT = Prompt(0, "abc", np.arange(3, dtype=np.int32), {})
Answer = Callable[[GenerateRequest], Awaitable[Generation]]


def generation(version: int = 0, num_tokens: int = 4) -> Generation:
    return Generation(
        token_ids=np.ones(num_tokens, np.int32),
        logprobs=-np.ones(num_tokens, np.float32),
        finish_reason="stop",
        segments=(VersionSegment(version, 0, num_tokens),),
    )


class LocalServer(InferenceClient):
    """Generation alone, given by a function; it keeps the requests it has seen."""

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

    async def _none(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this server only generates")

    abort = health = load = version = num_workers = pause = resume = _none
    describe = join_weight_group = leave_weight_groups = begin_update = _none
    receive_bucket = commit_update = update_from_disk = rate = close = _none


def make(*servers: LocalServer, **settings: Any) -> Dispatcher:
    defaults: dict[str, Any] = {"request_timeout_seconds": 20.0, "max_consecutive_failures": 32}
    return Dispatcher(servers, vocab_size=100, **{**defaults, **settings})


def test_server_gets_work_only_after_it_was_attested():
    dispatcher = make(LocalServer("http://a"), LocalServer("http://b"))
    assert dispatcher.choose(lambda version: True) is None
    dispatcher.set_version("http://b", 3)
    chosen = dispatcher.choose(lambda version: version == 3)
    assert chosen is dispatcher.servers["http://b"]
    assert dispatcher.choose(lambda version: version > 3) is None
    dispatcher.set_lost("http://b", "gone")
    assert dispatcher.choose(lambda version: True) is None


def test_least_loaded_server_is_chosen_and_load_counts_at_once():
    async def run() -> None:
        dispatcher = make(LocalServer("http://a"), LocalServer("http://b"))
        for url in dispatcher.servers:
            dispatcher.set_version(url, 0)
        first = dispatcher.choose(lambda version: True)
        assert first is not None
        task = dispatcher.submit(PROMPT, first, SAMPLING)
        assert dispatcher.in_flight == 1
        assert dispatcher.choose(lambda version: True) is not first
        await task
        await asyncio.sleep(0)  # the load is given back by a callback of the task
        assert dispatcher.in_flight == 0

    asyncio.run(run())


def test_requests_fit_the_row_and_no_id_is_the_beginning_of_another():
    async def run() -> None:
        server = LocalServer("http://a")
        dispatcher = make(server)
        dispatcher.set_version("http://a", 0)
        await asyncio.gather(
            *(
                dispatcher.submit(PROMPT, dispatcher.servers["http://a"], SAMPLING)
                for _ in range(12)
            )
        )
        assert {request.max_new_tokens for request in server.requests} == {7}
        ids = [request.request_id for request in server.requests]
        assert len(set(ids)) == 12
        assert not any(a != b and b.startswith(a) for a in ids for b in ids)

    asyncio.run(run())


def test_failed_request_is_tried_on_another_server():
    async def run() -> None:
        bad, good = LocalServer("http://bad"), LocalServer("http://good")
        bad.answer = bad.fail
        dispatcher = make(bad, good)
        for url in dispatcher.servers:
            dispatcher.set_version(url, 0)
        await dispatcher.submit(PROMPT, dispatcher.servers["http://bad"], SAMPLING)
        assert (len(bad.requests), len(good.requests)) == (1, 1)
        assert dispatcher.num_failed_requests == 1
        assert not dispatcher.servers["http://bad"].is_ready()

    asyncio.run(run())


def test_failed_request_is_not_retried_on_a_server_with_older_weights():
    async def run() -> None:
        bad, old = LocalServer("http://bad"), LocalServer("http://old")
        bad.answer = bad.fail
        dispatcher = make(bad, old)
        dispatcher.set_version("http://bad", 5)
        dispatcher.set_version("http://old", 4)
        with pytest.raises(ServerError, match="http://bad: broken"):
            await dispatcher.submit(PROMPT, dispatcher.servers["http://bad"], SAMPLING)
        assert (len(bad.requests), len(old.requests)) == (2, 0)

    asyncio.run(run())


def test_failures_in_a_row_stop_the_run_and_name_the_server():
    async def run() -> None:
        server = LocalServer("http://a")
        server.answer = server.fail
        dispatcher = make(server, max_consecutive_failures=2)
        dispatcher.set_version("http://a", 0)
        with pytest.raises(
            ServersFailing,
            match=r"2 requests for completions failed in a row .* http://a: .*broken",
        ):
            await dispatcher.submit(PROMPT, dispatcher.servers["http://a"], SAMPLING)

    asyncio.run(run())


def test_burst_of_requests_that_die_together_counts_as_one_failure():
    async def run() -> None:
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
        dispatcher = make(server, max_consecutive_failures=2)
        dispatcher.set_version("http://a", 0)
        home = dispatcher.servers["http://a"]
        tasks = [dispatcher.submit(PROMPT, home, SAMPLING) for _ in range(first_tries)]
        assert len(await asyncio.gather(*tasks)) == first_tries
        assert dispatcher.num_failed_requests == first_tries

    asyncio.run(run())


def test_requests_on_a_lost_server_are_given_up_at_once():
    async def run() -> None:
        server, other = LocalServer("http://a"), LocalServer("http://b")
        server.answer = server.hang
        dispatcher = make(server, other)
        dispatcher.set_version("http://a", 0)
        task = dispatcher.submit(PROMPT, dispatcher.servers["http://a"], SAMPLING)
        while not server.requests:
            await asyncio.sleep(0)
        dispatcher.set_version("http://b", 0)
        dispatcher.set_lost("http://a", "its update timed out")
        await task
        assert len(other.requests) == 1

    asyncio.run(run())


async def in_flight_on(server: LocalServer, dispatcher: Dispatcher) -> asyncio.Task[Generation]:
    """A completion that the server is writing, and will not end."""
    server.answer = server.hang
    dispatcher.set_version(server.url, 3)
    task = dispatcher.submit(PROMPT, dispatcher.servers[server.url], SAMPLING)
    while not server.requests:
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("end", ["remove", "set_lost", "set_down"])
def test_what_a_server_had_waits_for_one_that_is_not_older(end: str):
    async def run() -> None:
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

    asyncio.run(run())


def test_completion_that_is_given_back_again_and_again_is_not_failed():
    async def run() -> None:
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

    asyncio.run(run())


def test_completion_that_nobody_takes_fails_at_its_timeout():
    async def run() -> None:
        server = LocalServer("http://a")
        dispatcher = make(server, request_timeout_seconds=0.3)
        task = await in_flight_on(server, dispatcher)
        dispatcher.remove("http://a")
        with pytest.raises(
            ServerError, match=r"No server of policy_version 3 .* = 0\.3\. The previous attempt"
        ):
            await task
        assert dispatcher.in_flight == 0

    asyncio.run(run())


def test_removed_server_is_not_waited_for_while_it_is_told():
    async def run() -> None:
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

    asyncio.run(run())


def test_late_news_of_servers_that_are_not_there_is_harmless():
    async def run() -> None:
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

    asyncio.run(run())


def test_cancelled_completion_cancels_its_request():
    async def run() -> None:
        server = LocalServer("http://a")
        cancelled = asyncio.Event()

        async def hang(request: GenerateRequest) -> Generation:
            try:
                return await server.hang(request)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        server.answer = hang
        dispatcher = make(server)
        dispatcher.set_version("http://a", 0)
        task = dispatcher.submit(PROMPT, dispatcher.servers["http://a"], SAMPLING)
        while not server.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(cancelled.wait(), 5)

    asyncio.run(run())


def test_request_without_an_answer_fails_at_its_timeout():
    async def run() -> None:
        server = LocalServer("http://a")
        server.answer = server.hang
        dispatcher = make(server, request_timeout_seconds=0.05)
        dispatcher.set_version("http://a", 0)
        with pytest.raises(ServerError, match=r"rollout.request_timeout_seconds = 0.05"):
            await dispatcher.submit(PROMPT, dispatcher.servers["http://a"], SAMPLING)

    asyncio.run(run())


def test_the_server_with_the_least_work_left_is_chosen_not_the_one_with_the_fewest():
    async def run() -> None:
        few, many = LocalServer("http://few"), LocalServer("http://many")
        few.answer = few.hang
        many.answer = many.hang
        dispatcher = make(few, many)
        long = replace(SAMPLING, max_new_tokens=1000)
        tasks = []
        for url, expected, count in (("http://few", 900.0, 1), ("http://many", 100.0, 8)):
            dispatcher.set_version(url, 0)
            for _ in range(count):
                server = dispatcher.servers[url]
                tasks.append(dispatcher.submit(PROMPT, server, long, expected_tokens=expected))
        assert dispatcher.choose(lambda version: True) is dispatcher.servers["http://many"]
        tasks.append(
            dispatcher.submit(PROMPT, dispatcher.servers["http://many"], long, expected_tokens=200)
        )
        assert dispatcher.choose(lambda version: True) is dispatcher.servers["http://few"]
        await end(tasks, dispatcher)

    asyncio.run(run())


async def end(tasks: list[asyncio.Task[Generation]], dispatcher: Dispatcher) -> None:
    """Cancels what hangs, and finds that nothing is left of it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert dispatcher.in_flight == 0
    assert [server.load for server in dispatcher.servers.values()] == [0] * len(dispatcher.servers)


def test_work_is_left_less_as_it_is_written_and_never_quite_done():
    job = Job(expected_tokens=100, started_at=50.0)
    assert job.remaining_tokens(50.0, tokens_per_second=10) == 100
    assert job.remaining_tokens(54.0, tokens_per_second=10) == 60
    # It is longer than was expected, and may be so for a while yet.
    assert job.remaining_tokens(500.0, tokens_per_second=10) == 25
    assert job.remaining_tokens(500.0, tokens_per_second=0) == 100


def test_a_server_that_has_the_prefix_is_preferred_where_it_may_be_chosen():
    dispatcher = make(
        LocalServer("http://a"), LocalServer("http://b"), max_concurrent_rollouts=4, group_size=2
    )
    for url in dispatcher.servers:
        dispatcher.set_version(url, 3)
    a, b = dispatcher.servers.values()
    a.begin_job(8)
    assert dispatcher.choose(lambda version: True) is b
    assert dispatcher.choose(lambda version: True, prefer="http://a") is a
    a.begin_job(8)  # its window is full now
    assert dispatcher.choose(lambda version: True, prefer="http://a") is b
    dispatcher.set_version("http://a", 2)
    assert dispatcher.choose(lambda version: version == 3, prefer="http://a") is b
    assert dispatcher.choose(lambda version: True, prefer="http://gone") is b


def test_a_group_goes_where_it_fits_whole_and_else_where_most_of_it_does():
    servers = [LocalServer(f"http://{name}") for name in "abc"]
    dispatcher = make(*servers, max_concurrent_rollouts=30, group_size=4)
    for url in dispatcher.servers:
        dispatcher.set_version(url, 0)
    a, b, c = dispatcher.servers.values()
    for server, count, tokens in ((a, 8, 1.0), (b, 6, 100.0), (c, 5, 200.0)):
        for _ in range(count):
            server.begin_job(tokens)
    assert dispatcher.choose(lambda version: True) is b  # less work is left on a, and no room
    b.begin_job(1.0)
    assert dispatcher.choose(lambda version: True) is c
    c.begin_job(1.0)
    c.begin_job(1.0)
    c.begin_job(1.0)
    # 2, 3 and 2 of their 10 places are free.
    assert dispatcher.choose(lambda version: True) is b


def test_a_group_that_fails_together_goes_on_together():
    async def run() -> None:
        bad, *others = (LocalServer(f"http://{name}") for name in ("bad", "b", "c"))
        all_there = asyncio.Event()

        async def fail_together(request: GenerateRequest) -> Generation:
            if len(bad.requests) == 6:
                all_there.set()
            await all_there.wait()
            raise ServerError("http://bad: connection lost")

        bad.answer = fail_together
        for server in others:
            server.answer = server.hang
        dispatcher = make(bad, *others)
        for url in dispatcher.servers:
            dispatcher.set_version(url, 0)
        home = dispatcher.servers["http://bad"]
        prompts = [replace(PROMPT, index=i) for i in range(2)]
        tasks = [dispatcher.submit(prompts[i // 3], home, SAMPLING) for i in range(6)]
        async with asyncio.timeout(60):
            while sum(len(server.requests) for server in others) < 6:
                await asyncio.sleep(0)
        for server in others:
            assert len({r.request_id.split("-")[1] for r in server.requests}) == 1
        await end(tasks, dispatcher)

    asyncio.run(run())


def test_a_full_window_takes_no_new_work_and_what_has_begun_goes_on():
    dispatcher = make(LocalServer("http://a"), max_concurrent_rollouts=6, group_size=2)
    dispatcher.set_version("http://a", 0)
    (server,) = dispatcher.servers.values()
    for _ in range(6):
        assert dispatcher.choose(lambda version: True) is server
        server.begin_job(8)
    assert dispatcher.choose(lambda version: True) is None
    assert dispatcher.choose(lambda version: True, has_begun=True) is server


@pytest.mark.parametrize(
    "settings", [{}, {"max_concurrent_rollouts": 4, "adaptive_concurrency": False}]
)
def test_without_windows_servers_are_given_what_comes(settings: dict[str, Any]):
    dispatcher = make(LocalServer("http://a"), **settings)
    dispatcher.set_version("http://a", 0)
    (server,) = dispatcher.servers.values()
    for _ in range(100):
        server.begin_job(8)
    assert dispatcher.choose(lambda version: True) is server


def test_servers_share_what_is_in_flight_and_a_lost_ones_share_goes_to_the_others():
    a, b, c = (LocalServer(f"http://{name}") for name in "abc")
    dispatcher = make(a, b, max_concurrent_rollouts=60, group_size=4)
    windows = {url: server.window for url, server in dispatcher.servers.items()}

    def sizes() -> list[int]:
        return [window.size for window in windows.values() if window is not None]

    assert sizes() == [30, 30]
    dispatcher.add(c)
    windows["http://c"] = dispatcher.servers["http://c"].window
    assert sizes() == [30, 30, 20]
    dispatcher.set_down("http://a", "its process has ended")
    assert sizes() == [30, 30, 30]
    dispatcher.remove("http://b")
    assert windows["http://c"] is not None
    assert windows["http://c"].size == 60
    dispatcher.set_running("http://a")
    assert dispatcher.servers["http://a"].window is not windows["http://a"]


def test_many_that_fail_on_the_only_server_are_tried_again_though_its_window_has_shrunk():
    async def run() -> None:
        server = LocalServer("http://a")
        broken, first_tries = asyncio.Event(), 20

        async def die_together(request: GenerateRequest) -> Generation:
            if len(server.requests) > first_tries:
                return generation()
            if len(server.requests) == first_tries:
                broken.set()
            await broken.wait()
            raise ServerError("http://a: connection lost")

        server.answer = die_together
        dispatcher = make(server, max_concurrent_rollouts=first_tries, group_size=2)
        dispatcher.set_version("http://a", 0)
        home = dispatcher.servers["http://a"]
        tasks = [dispatcher.submit(PROMPT, home, SAMPLING) for _ in range(first_tries)]
        assert len(await asyncio.gather(*tasks)) == first_tries
        assert home.window is not None
        assert home.window.num_cuts == 1
        assert home.window.size < first_tries

    asyncio.run(run())


def test_loads_are_asked_for_and_those_that_are_not_told_are_not_known():
    async def run() -> None:
        told, silent, wrong = (LocalServer(f"http://{name}:1") for name in ("t", "s", "w"))
        asked = asyncio.Event()

        async def tell() -> ServerLoad:
            return ServerLoad(running=3, waiting=9, kv_use=0.5)

        async def say_nothing() -> ServerLoad:
            return await asyncio.get_running_loop().create_future()

        async def refuse() -> ServerLoad:
            asked.set()
            raise ServerError("http://w:1/metrics answered 404")

        told.load, silent.load, wrong.load = tell, say_nothing, refuse  # type: ignore[method-assign]
        dispatcher = make(told, silent, wrong, max_concurrent_rollouts=30, group_size=2)
        for server in dispatcher.servers.values():
            server.reported = ServerLoad(0, 0, None)
        changed = asyncio.Event()
        dispatcher.listeners.append(changed.set)
        watch = asyncio.create_task(dispatcher.watch_loads())
        async with asyncio.timeout(60):
            await asked.wait()
            await changed.wait()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        servers = dispatcher.servers
        assert servers["http://t:1"].reported == ServerLoad(3, 9, 0.5)
        assert servers["http://s:1"].reported is None
        assert servers["http://w:1"].reported is None
        assert not servers["http://w:1"].failures_in_a_row
        assert dispatcher.metrics() == {
            "rollout/hedged_completions": 0.0,
            "rollout/hedges_won": 0.0,
            "servers/t:1/inflight_rollouts": 0.0,
            "servers/t:1/window": 10.0,
            "servers/t:1/running": 3.0,
            "servers/t:1/waiting": 9.0,
            "servers/t:1/kv_use": 0.5,
            "servers/s:1/inflight_rollouts": 0.0,
            "servers/s:1/window": 10.0,
            "servers/w:1/inflight_rollouts": 0.0,
            "servers/w:1/window": 10.0,
        }

    asyncio.run(run())


async def written_ahead(server: LocalServer, dispatcher: Dispatcher) -> asyncio.Task[Generation]:
    """A completion that was written under version 4 of a server that is attested with 3."""

    async def answer(request: GenerateRequest) -> Generation:
        return generation(4 if len(server.requests) == 1 else 5)

    server.answer = answer
    dispatcher.set_version(server.url, 3)
    task = dispatcher.submit(PROMPT, dispatcher.servers[server.url], SAMPLING)
    await asyncio.sleep(0.05)
    assert server.requests
    assert not task.done()
    return task


def test_completion_under_weights_not_yet_attested_waits_for_that():
    async def run() -> None:
        server = LocalServer("http://a")
        dispatcher = make(server)
        task = await written_ahead(server, dispatcher)
        dispatcher.set_version("http://a", 4)
        assert (await task).segments[0].version == 4
        assert len(server.requests) == 1

    asyncio.run(run())


def test_completion_under_weights_that_turn_out_wrong_is_generated_again():
    async def run() -> None:
        server = LocalServer("http://a")
        dispatcher = make(server)
        task = await written_ahead(server, dispatcher)
        dispatcher.set_lost("http://a", "its logprobs are not the trainer's")
        dispatcher.set_version("http://a", 5)
        assert (await task).segments[0].version == 5
        assert len(server.requests) == 2

    asyncio.run(run())


def test_completion_under_weights_that_nobody_attests_fails_at_its_timeout():
    async def run() -> None:
        server = LocalServer("http://a")
        dispatcher = make(server, request_timeout_seconds=0.5)
        task = await written_ahead(server, dispatcher)
        with pytest.raises(ServerError, match="version 5, which was not attested within"):
            await task
        assert dispatcher.num_failed_requests == len(server.requests) == 2
        assert "version 5, which was not attested within" in dispatcher.last_error

    asyncio.run(run())


def test_server_that_answers_with_older_weights_than_attested_gets_no_more_work():
    async def run() -> None:
        server = LocalServer("http://a")
        dispatcher = make(server)
        dispatcher.set_version("http://a", 4)
        await dispatcher.submit(PROMPT, dispatcher.servers["http://a"], SAMPLING)
        assert dispatcher.choose(lambda version: True) is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "abort"}, "it was aborted after 4 tokens"),
        ({"token_ids": np.array([], np.int32)}, "it has 0 tokens"),
        (
            {"token_ids": np.full(4, 100, np.int32)},
            "its token ids are 100 to 100, expected 0 to 99",
        ),
        ({"logprobs": np.full(4, np.nan, np.float32)}, "not one finite number per token"),
        ({"logprobs": -np.ones(3, np.float32)}, "its 3 logprobs"),
        ({"segments": ()}, "do not cover 4 tokens"),
        ({"segments": (VersionSegment(0, 0, 3),)}, "do not cover 4 tokens"),
        ({"segments": (VersionSegment(0, 0, 1), VersionSegment(1, 2, 4))}, "do not cover"),
    ],
)
def test_answer_that_cannot_be_trained_on_is_refused(change: dict[str, Any], message: str):
    request = SAMPLING.request("r", PROMPT)
    check_generation(generation(), request, 100, "http://a")
    check_generation(
        replace(generation(), segments=(VersionSegment(0, 0, 1), VersionSegment(1, 1, 4))),
        request,
        100,
        "http://a",
    )
    with pytest.raises(ServerError, match=message):
        check_generation(replace(generation(), **change), request, 100, "http://a")


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
def test_whatever_servers_do_each_completion_ends_once_and_nothing_is_left(seed: int):
    async def run() -> None:
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
        for i in range(300):
            while dispatcher.in_flight >= 24 or (home := dispatcher.choose(lambda v: True)) is None:
                await asyncio.sleep(0.001)
            assert home.version is not None
            task = dispatcher.submit(replace(PROMPT, index=i // 2), home, SAMPLING)
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
        assert dispatcher.num_hedges_won > 0
        async with asyncio.timeout(60):
            while dispatcher.in_flight or any(s.requests for s in dispatcher.servers.values()):
                await asyncio.sleep(0.001)
        assert [server.load for server in dispatcher.servers.values()] == [0, 0, 0]
        assert [server.running for server in servers] == [0, 0, 0]

    asyncio.run(run())
