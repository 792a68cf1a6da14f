# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A hedged completion ends well in every way in which its two attempts can end."""

import asyncio

import pytest
from local_server import LocalServer, attested, submit

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.attempts import GivenBack, first_answer, is_overdue
from torchtitan.grpo.rollout.serving.server_state import Job, Server


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
