# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Clients of servers that are objects of the test, and HTTP servers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

from torchtitan.grpo.inference.client import InferenceClient


class StubClient(InferenceClient):
    """Has each method of a client; those that a test needs are overridden."""

    async def _none(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this server does only what its test needs")

    abort = generate = health = load = version = num_workers = pause = resume = rate = _none
    describe = join_weight_group = leave_weight_groups = begin_update = _none
    receive_bucket = commit_update = update_from_disk = close = _none
    sleep = wake = _none


@asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0
) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def answering(
    parts: list[bytes], pause: float = 0.0, seconds: float = 60.0
) -> AsyncIterator[tuple[str, list[int]]]:
    """Serves the parts of an answer, with a pause after each; yields the URL and the connections."""
    seen: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(1)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
            if pause:
                await reader.read()  # until the client gives up
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(seconds):
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()
