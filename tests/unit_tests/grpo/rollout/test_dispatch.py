# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Dispatch and producer against servers in this process that fail on demand."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.rollout.dispatch import Dispatcher, ServersFailing
from torchtitan.grpo.rollout.requests import Sampling, check_generation
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

    abort = health = version = num_workers = pause = resume = _none
    join_weight_group = leave_weight_groups = begin_update = _none
    receive_bucket = commit_update = update_from_disk = prompt_logprobs = close = _none


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
        with pytest.raises(ServersFailing, match=r"2 completions in a row .* http://a: .*broken"):
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
        with pytest.raises(ServerError, match=r"No server of policy_version 3 .* = 0\.3, after: "):
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


def test_completion_under_weights_that_turn_out_wrong_is_written_anew():
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
        ({"token_ids": np.full(4, 100, np.int32)}, "its token ids reach 100"),
        ({"logprobs": np.full(4, np.nan, np.float32)}, "not one finite number a token"),
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
