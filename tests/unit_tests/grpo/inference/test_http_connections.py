# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests when a connection to a server is reused, and when it is not."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from stub_clients import serving

from torchtitan.grpo.inference.http import HttpConnection, RouteError

SECONDS = 60.0
LITTLE_LATER = 0.02
_SETTINGS: Any = {"api_key": None, "admin_key": None, "timeout_seconds": SECONDS}


class Server:
    """Records the connection over which each request arrives."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self.may_answer = asyncio.Event()
        self._transports: set[asyncio.Transport] = set()

    async def answer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        self._transports.add(request.transport)
        if "slow" in request.query:
            await self.may_answer.wait()
        if "broken" not in request.query:
            return web.json_response({})
        # As uvicorn does after an error of the application: it answers as if it would keep
        # the connection, and closes it a little later.
        asyncio.get_running_loop().call_later(LITTLE_LATER, request.transport.close)
        return web.json_response({}, status=500)

    def close_connections(self) -> None:
        for transport in self._transports:
            transport.close()


@asynccontextmanager
async def connected(idle_seconds: float) -> AsyncIterator[tuple[Server, HttpConnection]]:
    server = Server()
    async with serving(server.answer) as url:
        connection = HttpConnection(url, **_SETTINGS, idle_seconds=idle_seconds)
        yield server, connection
        await connection.close()


@pytest.mark.parametrize(("idle_seconds", "num_connections"), [(0.0, 5), (SECONDS, 1)])
async def test_a_connection_is_kept_where_that_is_asked_for(idle_seconds, num_connections):
    async with connected(idle_seconds) as (server, connection):
        for _ in range(5):
            await connection.post("/")
    assert len(server.ports) == 5
    assert len(set(server.ports)) == num_connections


@pytest.mark.parametrize("closes", [False, True])
async def test_a_connection_that_was_idle_for_too_long_or_was_closed_loses_no_request(closes):
    async with connected(SECONDS if closes else 0.05) as (server, connection):
        await connection.post("/")
        if closes:
            server.close_connections()
        await asyncio.sleep(0.2)
        assert (await connection.post("/")).status == 200
    assert len(set(server.ports)) == 2


async def test_after_an_internal_error_nothing_is_sent_over_that_connection():
    async with connected(SECONDS) as (server, connection):
        beside = asyncio.create_task(connection.post("/?slow=1"))
        while not server.ports:
            await asyncio.sleep(0.01)
        with pytest.raises(RouteError, match="answered 500") as broken_answer:
            await connection.post("/?broken=1")
        assert broken_answer.value.body == {}
        for _ in range(3):
            assert (await connection.post("/")).status == 200
        server.may_answer.set()
        # What was under way is not given up.
        assert (await beside).status == 200
    slow, broken, *later = server.ports
    assert len({slow, broken, *later}) == 3 and len(set(later)) == 1


class CountingConnection(HttpConnection):
    """Counts the requests that begin in each turn of the event loop."""

    def __init__(self, url: str) -> None:
        super().__init__(url, **_SETTINGS)
        self.turn = 0
        self.begun: Counter[int] = Counter()

    async def count_turns(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1

    def _open_session(self):
        self.begun[self.turn] += 1
        return super()._open_session()


async def test_requests_that_come_at_once_begin_one_a_turn_of_the_loop():
    async with serving(Server().answer) as url:
        connection = CountingConnection(url)
        turns = asyncio.create_task(connection.count_turns())
        try:
            await asyncio.gather(*(connection.post("/") for _ in range(40)))
        finally:
            turns.cancel()
            await connection.close()
    assert sum(connection.begun.values()) == 40
    assert max(connection.begun.values()) == 1
