# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
import contextlib
import functools
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from prompt_files import process_config
from stub_clients import serving

from torchtitan.grpo.config import ClusterRow, Inference, Prompts, Rollout
from torchtitan.grpo.inference.registry import Registration, RegistryFolder
from torchtitan.grpo.rollout.serving import fleet
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.fleet import ServerFleet


def fleet_of(
    *urls: str, file: Path | None = None, announce=None, seconds: float = 120.0, **settings: Any
) -> ServerFleet:
    """A fleet of servers that the configuration, or a file, names, or that register themselves."""
    inference = Inference(
        kind="embedded",
        launch=False,
        urls=list(urls),
        startup_timeout_seconds=seconds,
        urls_file=None if file is None else str(file),
        **settings,
    )
    config = process_config(
        Path(), Prompts(), inference=inference, vocab_size=128, eos_token_ids=[1], seq_len=32
    )
    return ServerFleet(config, announce)


@contextlib.asynccontextmanager
async def watched(fleet: ServerFleet) -> AsyncIterator[tuple[Dispatcher, asyncio.Queue]]:
    """Follows the changes of a fleet that was started; yields the URLs after each change."""
    changes: asyncio.Queue[list[str]] = asyncio.Queue()

    async def tell(servers) -> None:
        changes.put_nowait(sorted(server.url for server in servers))

    dispatcher = Dispatcher(fleet.clients, Rollout(), vocab_size=128)
    watching = asyncio.create_task(fleet.watch(dispatcher, tell))
    try:
        yield dispatcher, changes
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@contextlib.asynccontextmanager
async def healthy_servers(*answers: dict[str, Any]) -> AsyncIterator[list[str]]:
    """Servers that answer each request with what an embedded server tells of itself."""

    async def answer(told: dict[str, Any], request: web.Request) -> web.Response:
        assert request.transport is not None
        told.setdefault("peers", []).append(request.transport.get_extra_info("peername"))
        return web.json_response({k: v for k, v in told.items() if k != "peers"})

    async with contextlib.AsyncExitStack() as stack:
        servers = [serving(functools.partial(answer, told)) for told in answers]
        yield [await stack.enter_async_context(server) for server in servers]


def embedded() -> dict[str, Any]:
    return {"model_path": "", "data": [{}], "tp_size": 1, "vocab_size": 128, "embedded": True}


async def test_a_run_starts_once_all_servers_are_up_and_a_client_keeps_its_connection():
    told = embedded()
    # A port that is bound, and on which nobody listens, refuses connections.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        missing = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with healthy_servers(told) as (up,):
            for urls in ([missing, up], [up, missing]):
                both = fleet_of(*urls, seconds=1.0)
                with pytest.raises(TimeoutError, match=missing):
                    await both.start()
                await both.close()
            told["peers"] = []
            alone = fleet_of(up)
            await alone.start()
            assert [s.url for s in alone.servers] == [up]
            assert [s.software for s in alone.servers] == ["the embedded server"]
            for _ in range(5):
                await alone.clients[0].health()
            # A closed connection is a reference cycle, which the garbage collector frees late.
            assert len(told["peers"]) > 5
            assert len(set(told["peers"])) == 1
            await alone.close()


# Answers every request as an embedded server does that tells of itself.
PROGRAM = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(sys.argv[2].encode())
    do_POST = do_GET

HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


async def test_servers_of_a_lent_row_alone_sleep_and_stay_down_until_they_are_wanted(
    tmp_path: Path, monkeypatch
):
    def command(spec, environ) -> tuple[list[str], dict[str, str]]:
        told = json.dumps(embedded())
        return [sys.executable, "-c", PROGRAM, str(spec.port), told], dict(environ)

    monkeypatch.setattr("torchtitan.grpo.inference.local_servers.server_command", command)
    inference = Inference(launch=True, device="cpu", restart_seconds=0.01)
    rows = {"both": ClusterRow(["train", "rollout"]), "own": ClusterRow(["rollout"], 2)}
    settings = {"vocab_size": 128, "eos_token_ids": [1], "seq_len": 32, "dump_folder": tmp_path}
    config = process_config(tmp_path, Prompts(), inference=inference, cluster=rows, **settings)
    fleet = ServerFleet(config)
    try:
        await fleet.start()
        assert [server.is_lent for server in fleet.servers] == [True, False, False]
        async with watched(fleet) as (dispatcher, _), asyncio.timeout(60):
            await asyncio.sleep(0)  # until it is watched
            await fleet.set_wanted(False)
            assert [s.url for s in fleet.servers if not s.is_wanted] == fleet.lent
            lent, *others = fleet._supervisors
            first = [supervisor.server for supervisor in others]
            for url in dispatcher.servers:
                dispatcher.set_version(url, 0)
                await fleet.end(url)
            while lent.server or any(one.server in (None, *first) for one in others):
                await asyncio.sleep(0.01)
            await fleet.set_wanted(True)
            while lent.server is None:
                await asyncio.sleep(0.01)
            assert lent.is_lent and fleet.lent == [lent.client.url]
    finally:
        await fleet.close()


async def test_a_server_that_joins_later_and_cannot_be_used_leaves_again_by_name(tmp_path: Path):
    file, announced = tmp_path / "urls.txt", []
    wrong = embedded()
    del wrong["embedded"]
    async with healthy_servers(embedded(), wrong) as (up, unusable):
        file.write_text(f"{up}\n")
        fleet = fleet_of(file=file, announce=announced.append)
        await fleet.start()
        async with watched(fleet) as (dispatcher, changes):
            file.write_text(f"{up}\n{unusable}\n")
            assert await changes.get() == sorted([up, unusable])
            assert await changes.get() == [up]
            assert list(dispatcher.servers) == [up]
        await fleet.close()
    (text,) = announced
    assert unusable in text and "SGLang answers there" in text
    assert "The run continues without this server" in text


async def test_servers_that_register_join_and_those_that_leave_are_let_go_but_for_the_last(
    tmp_path: Path,
):
    folder, registry = RegistryFolder(tmp_path / "registry"), str(tmp_path / "registry")
    async with healthy_servers(embedded(), embedded()) as urls:
        first, second = (
            Registration(url, "embedded", "host", i, 1.0) for i, url in enumerate(urls)
        )
        folder.write(Registration("http://127.0.0.1:9", "embedded", "killed long ago", 3, 0.0))
        fleet = fleet_of(registry=registry, seconds=0.5)
        with pytest.raises(TimeoutError, match="must register itself within"):
            await fleet.start()
        await fleet.close()
        fleet = fleet_of(registry=registry)
        starting = asyncio.create_task(fleet.start())
        while not starting.done():  # as a server does, every two seconds
            first = first.next()
            folder.write(first)
            await asyncio.sleep(0.05)
        await starting
        assert [client.url for client in fleet.clients] == [first.url]
        async with watched(fleet) as (dispatcher, changes):
            folder.write(second)
            assert await changes.get() == sorted(urls)
            folder.remove(first)
            assert await changes.get() == [second.url]
            folder.remove(second)
            folder.write(first.next())
            assert await changes.get() == [first.url]
            assert list(dispatcher.servers) == [first.url]
        await fleet.close()


async def test_an_unforeseen_error_in_a_late_check_ends_the_watch(tmp_path: Path, monkeypatch):
    file = tmp_path / "urls.txt"

    async def fail(client, needs):
        raise KeyError("a mistake of ours")

    async with healthy_servers(embedded(), embedded()) as (up, late):
        file.write_text(f"{up}\n")
        fleet = fleet_of(file=file)
        await fleet.start()
        monkeypatch.setattr("torchtitan.grpo.rollout.serving.fleet.check_server", fail)
        file.write_text(f"{up}\n{late}\n")
        with pytest.raises(ExceptionGroup) as raised:
            await fleet.watch(Dispatcher(fleet.clients, Rollout(), vocab_size=128), AsyncMock())
        assert raised.group_contains(KeyError, match="a mistake of ours")
        await fleet.close()


async def test_servers_that_never_change_are_watched_until_somebody_cancels_it():
    async with healthy_servers(embedded()) as (url,):
        fleet = fleet_of(url)
        await fleet.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await fleet.watch(Dispatcher(fleet.clients, Rollout(), vocab_size=128), AsyncMock())
        await fleet.close()


async def test_a_server_that_is_still_starting_is_no_reason_for_a_warning(monkeypatch):
    async def slow(*arguments, show, **settings) -> None:
        await show("waiting: 0 of 1 ready", 0, 1)

    monkeypatch.setattr(fleet, "wait_until_up", slow)
    warned, said, shown = [], [], AsyncMock()
    config = fleet_of("http://127.0.0.1:1")._config
    made = ServerFleet(config, warned.append, said.append, shown)
    await made.start()
    await made.close()
    assert (warned, said) == ([], [])
    shown.assert_awaited_once_with("waiting: 0 of 1 ready", 0, 1)
