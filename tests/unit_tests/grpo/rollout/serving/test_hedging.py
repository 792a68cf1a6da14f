# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A hedged completion ends well in every way in which its two attempts can end."""

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from forked import ForkServer
from local_server import LocalServer, attested, submit

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import InferenceClient, ServerError, ServerLoad
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.local_servers import free_ports, stop_servers
from torchtitan.grpo.inference.server_spec import ServerSpec
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.rollout.serving.attempts import GivenBack, first_answer, is_overdue
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.server_state import Job, Server
from torchtitan.grpo.types import Prompt

NUM_ROWS = 4
LIMIT_SECONDS = 120
PROMPT = Prompt(0, "", np.array([2, 3, 4], np.int32), {})
LONG = Sampling(200, 256, 1.0, 1.0, -1, (), ignore_eos=True)
SHORT = Sampling(4, 256, 1.0, 1.0, -1, (), ignore_eos=True)


async def until_idle(client: InferenceClient) -> ServerLoad:
    while (load := await client.load()).running or load.waiting:
        await asyncio.sleep(0.02)
    return load


def announce(url: str, version: int) -> None:
    body = json.dumps({"new_version": str(version), "abort_all_requests": False}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/update_weight_version", body, headers)
    with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
        assert answer.status == 200


def test_a_real_server_tells_its_load_and_one_that_stalls_is_hedged(
    repository: Path, tmp_path: Path, fork_server: ForkServer
):
    model = str(repository / "assets/reverse_digits/model")
    servers = [
        fork_server.start_server(
            ServerSpec("embedded", model, port, "cpu", "float32", 256, NUM_ROWS), tmp_path / "log"
        )
        for port in free_ports(2)
    ]

    async def main() -> None:
        clients = [make_client("embedded", server.url) for server in servers]
        await wait_until_up(clients, servers, LIMIT_SECONDS)
        config = Rollout(request_timeout_seconds=LIMIT_SECONDS, hedge_seconds=0.2)
        dispatcher = Dispatcher(clients, config, vocab_size=128)
        for client in clients:
            announce(client.url, 3)
            dispatcher.set_version(client.url, 3)
        first, second = dispatcher.servers.values()

        requests = [LONG.request(f"{i}-", PROMPT) for i in range(NUM_ROWS + 6)]
        tasks = [asyncio.create_task(clients[1].generate(request)) for request in requests]
        while (load := await clients[1].load()).waiting < 6 or load.kv_use == 0:
            await asyncio.sleep(0.01)
        assert (load.running, load.waiting) == (NUM_ROWS, 6)
        assert load.kv_use is not None and 0 < load.kv_use <= 1
        await asyncio.gather(*tasks)
        assert await until_idle(clients[1]) == ServerLoad(0, 0, 0.0)

        os.kill(servers[0].process.pid, signal.SIGSTOP)
        found = await asyncio.gather(*(dispatcher.submit(PROMPT, first, SHORT) for _ in range(3)))
        assert all(generation.segments[0].version == 3 for generation in found)
        assert (dispatcher.num_hedged, dispatcher.num_hedges_won) == (3, 3)
        assert dispatcher.num_failed_requests == 0
        os.kill(servers[0].process.pid, signal.SIGCONT)
        await until_idle(clients[0])  # they were taken off it
        assert (dispatcher.in_flight, first.load, second.load) == (0, 0, 0)
        await dispatcher.close()
        for client in clients:
            await client.close()

    try:
        asyncio.run(asyncio.wait_for(main(), LIMIT_SECONDS))
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGCONT)
        stop_servers(servers)


@pytest.mark.parametrize("obstacle", ["older", "lost", "full", "bound"])
async def test_a_hedge_needs_a_server_that_may_have_it(obstacle: str):
    stalled, other = LocalServer("http://a"), LocalServer("http://b")
    stalled.answer = stalled.hang
    most = {"full": 4, "bound": 1}.get(obstacle, 64)
    dispatcher = attested(stalled, other, hedge_seconds=0.02, max_concurrent_rollouts=most)
    second = dispatcher.servers["http://b"]
    jobs = [second.begin_job(1) for _ in range(2)] if obstacle == "full" else []
    dispatcher.set_version("http://a", 3)
    if obstacle != "older":
        dispatcher.set_version("http://b", 3)
    if obstacle == "lost":
        dispatcher.set_lost("http://b", "gone")
    task = submit(dispatcher, "http://a")
    _, pending = await asyncio.wait({task}, timeout=0.3)
    assert pending
    assert dispatcher.num_hedged == 0
    if obstacle == "bound":
        task.cancel()
        return
    dispatcher.set_version("http://b", 3)  # and now it may
    for job in jobs:
        second.end_job(job)
    await task
    assert dispatcher.num_hedges_won == 1


async def test_a_cancelled_completion_leaves_both_servers():
    both = [LocalServer("http://a"), LocalServer("http://b")]
    for server in both:
        server.answer = server.hang
    dispatcher = attested(*both, hedge_seconds=0.02)
    first, second = dispatcher.servers.values()
    task = submit(dispatcher, "http://a")
    while dispatcher.num_hedged == 0:
        await asyncio.sleep(0.01)
    assert (dispatcher.in_flight, first.load, second.load) == (2, 1, 1)
    task.cancel()
    await asyncio.wait({task})
    for _ in range(3):
        await asyncio.sleep(0)
    assert (dispatcher.in_flight, first.load, second.load) == (0, 0, 0)
    assert not first.requests and not second.requests


def test_a_completion_that_may_be_merely_long_is_not_overdue():
    server = Server(LocalServer("http://a"))
    job = Job(expected_tokens=10, started_at=100.0)
    assert not is_overdue(server, job, 1000, hedge_seconds=5, now=104.9)
    assert is_overdue(server, job, 1000, hedge_seconds=5, now=105.0)  # its speed is not known
    server.tokens_per_second = 50.0  # 1,000 tokens in 20 s
    assert not is_overdue(server, job, 1000, hedge_seconds=5, now=119.9)
    assert is_overdue(server, job, 1000, hedge_seconds=5, now=120.0)
    assert not is_overdue(server, job, 1000, hedge_seconds=30, now=120.0)


BROKEN, LOST, FATAL = ServerError("broken"), GivenBack("lost"), RuntimeError("too many failures")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([(0, "mine")], ("mine", False)),
        ([(1, "mine")], ("mine", True)),
        # One that fails leaves it to the other, and where both fail, a real failure is told.
        ([(0, BROKEN), (1, "mine")], ("mine", True)),
        ([(1, BROKEN), (0, "mine")], ("mine", False)),
        ([(0, LOST), (1, BROKEN)], BROKEN),
        ([(0, BROKEN), (1, LOST)], BROKEN),
        ([(0, LOST), (1, LOST)], LOST),
        ([(0, FATAL)], FATAL),
    ],
)
async def test_of_two_attempts_the_first_good_answer_counts(events, expected):
    ends = [asyncio.get_running_loop().create_future() for _ in range(2)]

    async def attempt(number: int) -> str:
        return await ends[number]

    attempts = [asyncio.create_task(attempt(i)) for i in range(2)]
    racing = asyncio.create_task(first_answer(attempts[0], lambda: attempts[1], 0.01))
    await asyncio.sleep(0.05)
    for number, outcome in events:
        assert not racing.done()
        if isinstance(outcome, str):
            ends[number].set_result(outcome)
        else:
            ends[number].set_exception(outcome)
        await asyncio.sleep(0.02)
    if isinstance(expected, tuple):
        assert await racing == expected
    else:
        with pytest.raises(type(expected), match=str(expected)) as caught:
            await racing
        assert type(caught.value) is type(expected)
    for number in {0, 1} - {number for number, _ in events}:
        assert attempts[number].cancelled()
