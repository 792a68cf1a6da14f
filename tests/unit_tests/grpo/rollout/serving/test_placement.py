# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
from dataclasses import replace

from local_server import PROMPT, SAMPLING, LocalServer, attested, end, make

from torchtitan.grpo.inference.client import ServerError, ServerLoad
from torchtitan.grpo.rollout.serving.server_state import Job
from torchtitan.grpo.types import GenerateRequest, Generation


async def test_the_server_with_the_least_work_left_is_chosen_not_the_one_with_the_fewest():
    both = [LocalServer("http://few"), LocalServer("http://many")]
    for server in both:
        server.answer = server.hang
    dispatcher = attested(*both)
    few, many = dispatcher.servers.values()
    long = replace(SAMPLING, max_new_tokens=1000)
    tasks = [dispatcher.submit(PROMPT, few, long, expected_tokens=900)]
    tasks += [dispatcher.submit(PROMPT, many, long, expected_tokens=100) for _ in range(8)]
    assert dispatcher.choose(lambda version: True) is many
    tasks.append(dispatcher.submit(PROMPT, many, long, expected_tokens=200))
    assert dispatcher.choose(lambda version: True) is few
    await end(tasks, dispatcher)


def test_work_is_left_less_as_it_is_written_and_never_quite_done():
    job = Job(expected_tokens=100, started_at=50.0)
    assert job.remaining_tokens(50.0, tokens_per_second=10) == 100
    assert job.remaining_tokens(54.0, tokens_per_second=10) == 60
    # It is longer than was expected, and may be so for a while yet.
    assert job.remaining_tokens(500.0, tokens_per_second=10) == 25
    assert job.remaining_tokens(500.0, tokens_per_second=0) == 100


def test_a_server_that_has_the_prefix_is_preferred_where_it_may_be_chosen():
    servers = LocalServer("http://a"), LocalServer("http://b")
    dispatcher = attested(*servers, max_concurrent_rollouts=4, group_size=2)
    a, b = dispatcher.servers.values()
    a.begin_job(8)
    assert dispatcher.choose(lambda version: True) is b
    assert dispatcher.choose(lambda version: True, prefer="http://a") is a
    a.begin_job(8)  # its window is full now
    assert dispatcher.choose(lambda version: True, prefer="http://a") is b
    dispatcher.set_version("http://b", 1)
    assert dispatcher.choose(lambda version: version == 1, prefer="http://a") is b
    assert dispatcher.choose(lambda version: True, prefer="http://gone") is b


def test_a_group_goes_where_it_fits_whole_and_else_where_most_of_it_does():
    servers = [LocalServer(f"http://{name}") for name in "abc"]
    dispatcher = attested(*servers, max_concurrent_rollouts=30, group_size=4)
    a, b, c = dispatcher.servers.values()
    for server, count, tokens in ((a, 8, 1.0), (b, 6, 100.0), (c, 5, 200.0)):
        for _ in range(count):
            server.begin_job(tokens)
    assert dispatcher.choose(lambda version: True) is b  # less work is left on a, and no room
    b.begin_job(1.0)
    assert dispatcher.choose(lambda version: True) is c
    for _ in range(3):
        c.begin_job(1.0)
    # 2, 3 and 2 of their 10 places are free.
    assert dispatcher.choose(lambda version: True) is b


async def test_a_group_that_fails_together_goes_on_together():
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
    dispatcher = attested(bad, *others)
    home = dispatcher.servers["http://bad"]
    prompts = [replace(PROMPT, group_id=i) for i in range(2)]
    tasks = [dispatcher.submit(prompts[i // 3], home, SAMPLING) for i in range(6)]
    while sum(len(server.requests) for server in others) < 6:
        await asyncio.sleep(0)
    for server in others:
        assert len({r.request_id.split("-")[1] for r in server.requests}) == 1
    await end(tasks, dispatcher)


def test_a_full_window_takes_no_new_work_and_what_has_begun_goes_on():
    dispatcher = attested(LocalServer("http://a"), max_concurrent_rollouts=6, group_size=2)
    (server,) = dispatcher.servers.values()
    for _ in range(6):
        assert dispatcher.choose(lambda version: True) is server
        server.begin_job(8)
    assert dispatcher.choose(lambda version: True) is None
    assert dispatcher.choose(lambda version: True, has_begun=True) is server
    server.window = None  # without one it is given what comes
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
    assert sizes()[2] == 60
    dispatcher.set_running("http://a")
    assert dispatcher.servers["http://a"].window is not windows["http://a"]


async def test_loads_are_asked_for_and_those_that_are_not_told_are_not_known(caplog):
    caplog.set_level("INFO", "torchtitan.grpo.rollout.serving.server_state")
    told, silent, wrong = (LocalServer(f"http://{name}:1") for name in ("t", "s", "w"))

    async def tell() -> ServerLoad:
        return ServerLoad(running=3, waiting=9, kv_use=0.5)

    async def say_nothing() -> ServerLoad:
        return await asyncio.get_running_loop().create_future()

    async def refuse() -> ServerLoad:
        raise ServerError("http://w:1/metrics answered 404")

    told.load, silent.load, wrong.load = tell, say_nothing, refuse  # type: ignore[method-assign]
    dispatcher = make(told, silent, wrong, max_concurrent_rollouts=30, group_size=2)
    servers = dispatcher.servers
    for server in servers.values():
        server.reported = ServerLoad(0, 0, None)
    changed = asyncio.Event()
    dispatcher.listeners.append(changed.set)
    watch = asyncio.create_task(dispatcher.watch_loads())
    await changed.wait()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert [s.reported for s in servers.values()] == [ServerLoad(3, 9, 0.5), None, None]
    assert "The load of http://s:1 is unknown: no answer within 2 s" in caplog.messages
    assert not servers["http://w:1"].failures_in_a_row
    expected = {f"servers/{name}:1/inflight_rollouts": 0.0 for name in "tsw"}
    expected |= {f"servers/{name}:1/window": 10.0 for name in "tsw"}
    expected |= {
        "servers/t:1/running": 3.0, "servers/t:1/waiting": 9.0, "servers/t:1/kv_use": 0.5
    }  # fmt: skip
    assert dispatcher.metrics() == expected


def test_a_servers_times_come_with_the_number_of_completions_that_tell_them():
    (server,) = attested(LocalServer("http://a")).servers.values()
    for number in range(1, 21):
        job = server.begin_job(10)
        assert server.metrics().get("completions_total", 0) == (number - 1 if number > 16 else 0)
        server.end_job(job, num_tokens=number)
    assert {"request_seconds", "token_seconds", "beside_seconds"} < server.metrics().keys()
