# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A hedged completion ends well in every way in which its two attempts can end.

Some tests use two real servers, one of which is stopped.
"""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import ForkServer
from local_server import in_loop

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import InferenceClient, ServerError, ServerLoad
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.local_servers import LaunchedServer, free_ports, stop_servers
from torchtitan.grpo.inference.server_spec import ServerSpec
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.rollout.serving.attempts import GivenBack, first_answer, is_overdue
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.server_state import Job, Server
from torchtitan.grpo.types import Generation, Prompt

NUM_ROWS = 4
LIMIT_SECONDS = 120
PROMPT = Prompt(0, "", np.array([2, 3, 4], np.int32), {})
SAMPLING = Sampling(200, 256, 1.0, 1.0, -1, (), ignore_eos=True)
SHORT = Sampling(4, 256, 1.0, 1.0, -1, (), ignore_eos=True)


@pytest.fixture(scope="module")
def servers(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer
) -> Iterator[list[LaunchedServer]]:
    """Two embedded servers that serve version 3."""
    model = str(repository / "assets/reverse_digits/model")
    folder = tmp_path_factory.mktemp("servers")
    launched = [
        fork_server.start_server(
            ServerSpec("embedded", model, port, "cpu", "float32", 256, NUM_ROWS),
            folder / f"{port}.log",
        )
        for port in free_ports(2)
    ]

    async def wait() -> None:
        clients = [make_client("embedded", server.url) for server in launched]
        await wait_until_up(clients, launched, LIMIT_SECONDS)
        for client in clients:
            await client.close()

    try:
        asyncio.run(wait())
        for server in launched:
            body = json.dumps({"new_version": "3", "abort_all_requests": False}).encode()
            request = urllib.request.Request(
                f"{server.url}/update_weight_version", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
                assert answer.status == 200
        yield launched
    finally:
        for server in launched:
            if server.process.poll() is None:
                os.kill(server.process.pid, signal.SIGCONT)
        stop_servers(launched)


def clients_of(servers: list[LaunchedServer]) -> list[InferenceClient]:
    return [make_client("embedded", server.url) for server in servers]


def dispatcher_of(clients: list[InferenceClient], **settings: Any) -> Dispatcher:
    group_size = settings.pop("group_size", 1)
    config = Rollout(request_timeout_seconds=LIMIT_SECONDS, **settings)
    dispatcher = Dispatcher(clients, config, vocab_size=128, group_size=group_size)
    for client in clients:
        dispatcher.set_version(client.url, 3)
    return dispatcher


async def close(dispatcher: Dispatcher, clients: list[InferenceClient]) -> None:
    await dispatcher.close()
    for client in clients:
        await client.close()


async def until_idle(client: InferenceClient) -> ServerLoad:
    async with asyncio.timeout(LIMIT_SECONDS):
        while (load := await client.load()).running or load.waiting:
            await asyncio.sleep(0.02)
    return load


@in_loop
async def test_an_embedded_server_says_what_runs_and_what_waits(servers: list[LaunchedServer]):
    clients = clients_of(servers)
    dispatcher = dispatcher_of(clients)
    home = dispatcher.servers[clients[0].url]
    tasks = [dispatcher.submit(PROMPT, home, SAMPLING) for _ in range(NUM_ROWS + 6)]
    async with asyncio.timeout(LIMIT_SECONDS):
        while (load := await clients[0].load()).waiting < 6 or load.kv_use == 0:
            await asyncio.sleep(0.01)
    assert (load.running, load.waiting) == (NUM_ROWS, 6)
    assert load.kv_use is not None
    assert 0 < load.kv_use <= 1
    await asyncio.gather(*tasks)
    assert await until_idle(clients[0]) == ServerLoad(0, 0, 0.0)
    await close(dispatcher, clients)


@in_loop
async def test_a_server_that_queues_is_given_less(servers: list[LaunchedServer]):
    clients = clients_of(servers)[:1]
    dispatcher = dispatcher_of(clients, max_concurrent_rollouts=24, group_size=2)
    (home,) = dispatcher.servers.values()
    window = home.window
    assert window is not None
    watch = asyncio.create_task(dispatcher.watch_loads())
    tasks: list[asyncio.Task[Generation]] = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while window.num_cuts == 0:
            if dispatcher.choose(lambda version: True) is not None:
                tasks.append(dispatcher.submit(PROMPT, home, SAMPLING))
            await asyncio.sleep(0.001)
    assert window.size <= 12
    assert dispatcher.choose(lambda version: True) is None  # more than that are in flight
    assert home.reported is not None
    assert home.reported.waiting >= 2
    for task in (watch, *tasks):
        task.cancel()
    await asyncio.gather(watch, *tasks, return_exceptions=True)
    await until_idle(clients[0])
    await close(dispatcher, clients)


@in_loop
async def test_a_stalled_servers_completion_is_written_by_another_and_taken_off_it(
    servers: list[LaunchedServer],
):
    clients = clients_of(servers)
    dispatcher = dispatcher_of(clients, hedge_seconds=0.2)
    first, second = (dispatcher.servers[client.url] for client in clients)
    os.kill(servers[0].process.pid, signal.SIGSTOP)
    generations = await asyncio.gather(*(dispatcher.submit(PROMPT, first, SHORT) for _ in range(3)))
    assert all(g.segments[0].version == 3 for g in generations)
    assert (dispatcher.num_hedged, dispatcher.num_hedges_won) == (3, 3)
    assert dispatcher.num_failed_requests == 0
    os.kill(servers[0].process.pid, signal.SIGCONT)
    await until_idle(clients[0])
    for _ in range(3):
        await asyncio.sleep(0)
    assert (dispatcher.in_flight, first.load, second.load) == (0, 0, 0)
    await close(dispatcher, clients)


@pytest.mark.parametrize("obstacle", ["older", "lost", "full", "bound"])
@in_loop
async def test_a_hedge_needs_a_server_that_may_have_it(
    servers: list[LaunchedServer], obstacle: str
):
    clients = clients_of(servers)
    settings = {"full": {"max_concurrent_rollouts": 4}, "bound": {"max_concurrent_rollouts": 1}}
    dispatcher = dispatcher_of(clients, hedge_seconds=0.05, **settings.get(obstacle, {}))
    first, second = (dispatcher.servers[client.url] for client in clients)
    jobs = []
    if obstacle == "older":
        dispatcher.set_version(second.url, 2)
    elif obstacle == "lost":
        dispatcher.set_lost(second.url, "gone")
    elif obstacle == "full":
        jobs = [second.begin_job(1) for _ in range(2)]
    os.kill(servers[0].process.pid, signal.SIGSTOP)
    task = dispatcher.submit(PROMPT, first, SHORT)
    _, pending = await asyncio.wait({task}, timeout=0.5)
    assert pending
    assert dispatcher.num_hedged == 0
    if obstacle == "bound":
        os.kill(servers[0].process.pid, signal.SIGCONT)
        await task
        assert dispatcher.num_hedged == 0
    else:
        dispatcher.set_version(second.url, 3)  # and now it may
        for job in jobs:
            second.end_job(job)
        await task
        assert dispatcher.num_hedges_won == 1
        os.kill(servers[0].process.pid, signal.SIGCONT)
    await until_idle(clients[0])
    await close(dispatcher, clients)


@in_loop
async def test_a_cancelled_completion_leaves_both_servers(servers: list[LaunchedServer]):
    clients = clients_of(servers)
    dispatcher = dispatcher_of(clients, hedge_seconds=0.05)
    first, second = (dispatcher.servers[client.url] for client in clients)
    for server in servers:
        os.kill(server.process.pid, signal.SIGSTOP)
    task = dispatcher.submit(PROMPT, first, SAMPLING)
    async with asyncio.timeout(LIMIT_SECONDS):
        while dispatcher.num_hedged == 0:
            await asyncio.sleep(0.01)
    assert (dispatcher.in_flight, first.load, second.load) == (2, 1, 1)
    task.cancel()
    await asyncio.wait({task})
    for _ in range(3):
        await asyncio.sleep(0)
    assert (dispatcher.in_flight, first.load, second.load) == (0, 0, 0)
    for server, client in zip(servers, clients, strict=True):
        os.kill(server.process.pid, signal.SIGCONT)
        await until_idle(client)
    await close(dispatcher, clients)


def test_a_completion_that_may_be_merely_long_is_not_overdue():
    server = Server(make_client("embedded", "http://127.0.0.1:1"))
    job = Job(expected_tokens=10, started_at=100.0)
    assert not is_overdue(server, job, 1000, hedge_seconds=5, now=104.9)
    assert is_overdue(server, job, 1000, hedge_seconds=5, now=105.0)  # its speed is not known
    server.tokens_per_second = 50.0  # 1,000 tokens in 20 s
    assert not is_overdue(server, job, 1000, hedge_seconds=5, now=119.9)
    assert is_overdue(server, job, 1000, hedge_seconds=5, now=120.0)
    assert not is_overdue(server, job, 1000, hedge_seconds=30, now=120.0)


class Attempt:
    """One that ends when it is told to."""

    def __init__(self) -> None:
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str:
        return await self.end


async def race() -> tuple[Attempt, Attempt, "asyncio.Task[tuple[str, bool]]"]:
    first, second = Attempt(), Attempt()
    racing = asyncio.create_task(first_answer(first.task, lambda: second.task, 0.01))
    await asyncio.sleep(0.05)
    return first, second, racing


@pytest.mark.parametrize("winner", [0, 1])
@in_loop
async def test_the_first_good_answer_counts_and_the_other_attempt_is_cancelled(winner: int):
    *attempts, racing = await race()
    attempts[winner].end.set_result("mine")
    assert await racing == ("mine", winner == 1)
    await asyncio.wait({attempts[1 - winner].task})
    assert attempts[1 - winner].task.cancelled()


@pytest.mark.parametrize("loser", [0, 1])
@in_loop
async def test_an_attempt_that_fails_leaves_it_to_the_other(loser: int):
    *attempts, racing = await race()
    attempts[loser].end.set_exception(ServerError("broken"))
    await asyncio.sleep(0.05)
    assert not racing.done()
    attempts[1 - loser].end.set_result("mine")
    assert await racing == ("mine", loser == 0)


@pytest.mark.parametrize("given_back", [0, 1, 2])
@in_loop
async def test_where_both_fail_a_real_failure_is_told(given_back: int):
    *attempts, racing = await race()
    for i, attempt in enumerate(attempts):
        lost = given_back in (i, 2)
        attempt.end.set_exception(GivenBack("lost") if lost else ServerError("broken"))
    with pytest.raises(ServerError, match="lost" if given_back == 2 else "broken") as caught:
        await racing
    assert isinstance(caught.value, GivenBack) == (given_back == 2)


@in_loop
async def test_an_error_that_ends_the_run_is_not_held_back():
    first, second, racing = await race()
    first.end.set_exception(RuntimeError("too many failures"))
    with pytest.raises(RuntimeError, match="too many failures"):
        await racing
    await asyncio.wait({second.task})
    assert second.task.cancelled()
