# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When a connection to a server is used again, and when not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from torchtitan.grpo.inference.http import HttpConnection, RouteError

SECONDS = 60.0
_SETTINGS: Any = {"api_key": None, "admin_key": None, "timeout_seconds": SECONDS}


class Server:
    """Notes over which connection each request came."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self.url = ""
        self._transports: set[asyncio.Transport] = set()

    async def answer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        self._transports.add(request.transport)
        if "broken" in request.query:
            raise RuntimeError("an internal error")
        return web.json_response({})

    def close_connections(self) -> None:
        for transport in self._transports:
            transport.close()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Callable[[float], HttpConnection]]:
    app = web.Application()
    app.router.add_post("/", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made: list[HttpConnection] = []

    def connect(idle_seconds: float) -> HttpConnection:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        made.append(HttpConnection(url, **_SETTINGS, idle_seconds=idle_seconds))
        return made[-1]

    try:
        async with asyncio.timeout(SECONDS):
            yield connect
    finally:
        for connection in made:
            await connection.close()
        await runner.cleanup()


@pytest.mark.parametrize(("idle_seconds", "num_connections"), [(0.0, 5), (SECONDS, 1)])
def test_a_connection_is_kept_where_that_is_asked_for(idle_seconds, num_connections):
    async def body() -> None:
        server = Server()
        async with serving(server) as connect:
            connection = connect(idle_seconds)
            for _ in range(5):
                await connection.post("/")
        assert len(server.ports) == 5
        assert len(set(server.ports)) == num_connections

    asyncio.run(body())


def test_a_connection_that_was_idle_for_longer_is_not_used_again():
    async def body() -> None:
        server = Server()
        async with serving(server) as connect:
            connection = connect(0.05)
            await connection.post("/")
            await asyncio.sleep(0.2)
            await connection.post("/")
        assert len(set(server.ports)) == 2

    asyncio.run(body())


@pytest.mark.parametrize("closes", ["while idle", "after an internal error"])
def test_a_connection_that_the_server_has_closed_loses_no_request(closes):
    async def body() -> None:
        server = Server()
        async with serving(server) as connect:
            connection = connect(SECONDS)
            if closes == "while idle":
                await connection.post("/")
                server.close_connections()
                await asyncio.sleep(0.1)  # it takes a moment to be heard of
            else:
                with pytest.raises(RouteError, match="answered 500"):
                    await connection.post("/?broken=1")
            answer = await connection.post("/")
        assert answer.status == 200
        assert len(set(server.ports)) == 2

    asyncio.run(body())
