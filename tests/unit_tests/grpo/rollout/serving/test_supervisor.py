# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from server_kinds import held_port

from torchtitan.grpo.config import Inference
from torchtitan.grpo.inference.kinds import ServerSpec
from torchtitan.grpo.inference.local_servers import LaunchedServer
from torchtitan.grpo.rollout.serving import supervisor
from torchtitan.grpo.rollout.serving.server_state import Server
from torchtitan.grpo.system.child import start_child

# Listens until SIGUSR1, and then hangs, as vLLM does when its engine has died.
PROGRAM = """
import signal, socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: listener.close())
print("listens", flush=True)
while True:
    time.sleep(1)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[LaunchedServer]:
    monkeypatch.setattr(supervisor, "_LISTEN_SECONDS", 0.1)
    monkeypatch.setattr(supervisor, "_DEAF_SECONDS", 0.5)
    port = held_port()
    log = tmp_path / "server.log"
    process = start_child([sys.executable, "-c", PROGRAM, str(port)], log_file=log)
    launched = LaunchedServer(ServerSpec("vllm", "m", port, "cpu", "float32", 64, 1), process, log)
    while "listens" not in log.read_text():
        assert process.poll() is None, log.read_text()
    yield launched
    launched.stop(grace_seconds=0.0)


def dispatcher_of(server: LaunchedServer, *, was_attested: bool) -> Any:
    client: Any = SimpleNamespace(url=server.url)
    return SimpleNamespace(
        set_down=lambda url, reason: None,
        set_running=lambda url: None,
        servers={server.url: Server(client, attested=0 if was_attested else None)},
    )


async def supervise(
    server: LaunchedServer, seconds: float, *, was_attested: bool = True
) -> str | None:
    """Returns how the server has ended; None if it has not within ``seconds``."""
    dispatcher = dispatcher_of(server, was_attested=was_attested)
    client = dispatcher.servers[server.url].client
    one = supervisor.Supervisor(server, client, Inference(max_restarts=0))
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(one.run(dispatcher), seconds)
    return None


async def test_a_server_that_no_longer_listens_is_ended(server: LaunchedServer):
    server.process.send_signal(signal.SIGUSR1)
    end = await supervise(server, 60.0)
    assert end is not None and "It was stopped, because it had not listened for 0.5 s." in end
    assert server.process.poll() == -signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGUSR1])
async def test_a_server_that_ends_before_any_has_weights_is_not_restarted(server, signum):
    server.process.send_signal(signum)
    message = r"(?s)ended before the run used it.*exit status.*listens"
    with pytest.raises(RuntimeError, match=message):
        await supervise(server, 60.0, was_attested=False)


async def test_a_server_that_is_frozen_is_left_to_the_weight_pusher(server: LaunchedServer):
    os.killpg(server.process.pid, signal.SIGSTOP)
    assert await supervise(server, 1.5) is None
    assert server.process.poll() is None


async def test_time_in_which_the_supervisor_stood_still_is_not_held_against_a_server(server):
    deaf = asyncio.create_task(supervisor._until_deaf(server))
    for _ in range(3):
        await asyncio.sleep(0.05)
        time.sleep(0.6)  # longer than _DEAF_SECONDS
    await asyncio.sleep(0.3)
    assert not deaf.done()
    deaf.cancel()


async def pauses_until(
    num_pauses: int, server: LaunchedServer, monkeypatch, caplog, **settings: Any
) -> tuple[list[float], str | None]:
    """The pauses before restarts of a server that ends right after it is up, and its end.

    The end is ``None`` if the server is not given up after ``num_pauses`` pauses.
    """

    def start(spec: ServerSpec, log_file: Path, *, keep_log: bool) -> LaunchedServer:
        return LaunchedServer(spec, start_child([sys.executable, "-c", ""]), log_file)

    def pauses() -> list[float]:
        return [float(seconds) for seconds in re.findall(r"follows in (\S+) s", caplog.text)]

    monkeypatch.setattr(supervisor, "start_server", start)
    monkeypatch.setattr(supervisor, "wait_until_up", AsyncMock())
    dispatcher = dispatcher_of(server, was_attested=True)
    client, inference = dispatcher.servers[server.url].client, Inference(**settings)
    server.stop(grace_seconds=0.0)
    with caplog.at_level(logging.ERROR):
        work = asyncio.create_task(supervisor.Supervisor(server, client, inference).run(dispatcher))
        while not work.done() and len(pauses()) < num_pauses:
            await asyncio.sleep(0.01)
        end = work.result() if work.done() else None
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    return pauses(), end


async def test_a_server_that_ends_after_each_start_is_given_up(server, monkeypatch, caplog):
    settings = {"max_restarts": 4, "restart_seconds": 0.01, "max_restart_seconds": 0.03}
    pauses, end = await pauses_until(99, server, monkeypatch, caplog, **settings)
    assert pauses == [0.01, 0.02, 0.03, 0.03]
    assert end is not None and end.startswith("It was restarted 4 times")


async def test_a_server_that_was_up_for_long_has_all_restarts_again(server, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "_PROVEN_SECONDS", 0.0)
    settings = {"max_restarts": 1, "restart_seconds": 0.01}
    found = await pauses_until(5, server, monkeypatch, caplog, **settings)
    assert found == ([0.01] * 5, None)


async def test_a_start_that_is_broken_off_is_not_counted_and_is_repeated(server, monkeypatch):
    """A lent server is started only while its devices are lent."""
    starts = asyncio.Queue[LaunchedServer]()

    def start(spec: ServerSpec, log_file: Path, *, keep_log: bool) -> LaunchedServer:
        process = start_child([sys.executable, "-c", "import time; time.sleep(600)"])
        starts.put_nowait(LaunchedServer(spec, process, log_file))
        return LaunchedServer(spec, process, log_file)

    async def wait_until_up(_: Any, launched: list[LaunchedServer], __: float) -> None:
        while launched[0].process.poll() is None:
            await asyncio.sleep(0.01)
        raise RuntimeError("it ended early")

    monkeypatch.setattr(supervisor, "start_server", start)
    monkeypatch.setattr(supervisor, "wait_until_up", wait_until_up)
    dispatcher = dispatcher_of(server, was_attested=True)
    inference = Inference(max_restarts=0)
    one = supervisor.Supervisor(server, dispatcher.servers[server.url].client, inference)
    work = asyncio.create_task(one.run(dispatcher))
    assert await one.end(), "it was up"
    for _ in range(3):
        process = (await asyncio.wait_for(starts.get(), 60)).process
        one.set_wanted(False)
        assert not await one.end(), "it was not up"
        assert process.poll() is not None
        await asyncio.sleep(0.1)
        assert starts.empty(), "nobody wants it"
        one.set_wanted(True)
    (await asyncio.wait_for(starts.get(), 60)).stop(grace_seconds=0.0)
    end = await asyncio.wait_for(work, 60)
    assert end.startswith("It was restarted 0 times") and "it ended early" in end


async def test_a_server_that_is_ended_on_purpose_starts_when_it_is_wanted_and_is_not_counted(
    server, monkeypatch
):
    started: list[LaunchedServer] = []

    def start(spec: ServerSpec, log_file: Path, *, keep_log: bool) -> LaunchedServer:
        command = [sys.executable, "-c", PROGRAM, str(spec.port)]
        started.append(LaunchedServer(spec, start_child(command, log_file=log_file), log_file))
        return started[-1]

    monkeypatch.setattr(supervisor, "start_server", start)
    monkeypatch.setattr(supervisor, "wait_until_up", AsyncMock())
    dispatcher = dispatcher_of(server, was_attested=True)
    client = dispatcher.servers[server.url].client
    one = supervisor.Supervisor(server, client, Inference(max_restarts=0))
    work = asyncio.create_task(one.run(dispatcher))
    try:
        for number in (1, 2):
            one.set_wanted(False)
            await one.end()
            while one.server is not None:
                await asyncio.sleep(0.01)
            assert len(started) == number - 1
            one.set_wanted(True)
            while len(started) < number:
                await asyncio.sleep(0.01)
        assert not work.done()
        one.set_wanted(False)
        await one.end()
        while one.server is not None:
            await asyncio.sleep(0.01)
        assert one.close() is None
        one.set_wanted(True)
        await asyncio.wait_for(work, 60)
        assert len(started) == 2
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        for each in started:
            each.stop(grace_seconds=0.0)


async def test_a_server_that_is_ended_on_purpose_before_any_has_weights_does_not_end_the_run(
    server,
):
    dispatcher = dispatcher_of(server, was_attested=False)
    client = dispatcher.servers[server.url].client
    one = supervisor.Supervisor(server, client, Inference())
    one.set_wanted(False)
    work = asyncio.create_task(one.run(dispatcher))
    assert await one.end()
    while one.server is not None:
        assert not work.done()
        await asyncio.sleep(0.01)
    one.close()
    one.set_wanted(True)
    await asyncio.wait_for(work, 60)
