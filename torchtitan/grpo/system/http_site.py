# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Serves an aiohttp application behind the limits of `connections.py`."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.log import server_logger

from torchtitan.grpo.system.connections import (
    HEADER_SECONDS,
    SLOW_BODY,
    ConnectionLimits,
    answering,
    body_seconds,
)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SHUTDOWN_SECONDS = 0.3
_num_malformed = itertools.count(1)


@web.middleware
async def answered(request: web.Request, handler: _Handler) -> web.StreamResponse:
    with answering():
        return await handler(request)


class HttpSite:
    """Serves an application at an address. Handlers must run inside :func:`.connections.answering`.

    ``options`` are those of aiohttp's runner. The site may be closed at any time.
    """

    def __init__(self, app: web.Application, **options: Any) -> None:
        options = {"access_log": None, "shutdown_timeout": _SHUTDOWN_SECONDS} | options
        self._runner = web.AppRunner(app, **options)
        self._listener: asyncio.Server | None = None

    async def start(
        self,
        host: str,
        port: int,
        max_connections: int,
        header_seconds: float = HEADER_SECONDS,
        backlog: int = 128,
    ) -> tuple[str, int]:
        """Starts to listen. Returns host and port, where port 0 takes a free one. Raises OSError on failure."""
        await self._runner.setup()
        assert self._runner.server is not None, "it was set up"
        server_logger.addFilter(_without_contents)
        limits = ConnectionLimits(self._runner.server, max_connections, header_seconds)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(limits.make_protocol, host, port, backlog=backlog)
        return self._listener.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Returns a request's body. Raises HTTPRequestTimeout or HTTPRequestEntityTooLarge."""
    begun, body = asyncio.get_running_loop().time(), bytearray()
    try:
        while True:
            async with asyncio.timeout_at(begun + body_seconds(len(body))):
                part = await request.content.readany()
            if not part:
                return bytes(body)
            body += part
            if len(body) > max_bytes:
                raise web.HTTPRequestEntityTooLarge(max_bytes, len(body))
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text=SLOW_BODY) from error


def _without_contents(record: logging.LogRecord) -> bool:
    """Filters the log: counts malformed requests instead of showing them, as they may hold a key."""
    if not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)):
        return True
    number, record.exc_info = next(_num_malformed), None
    record.msg, record.args = "%d malformed HTTP requests were refused so far.", (number,)
    return number.bit_count() == 1  # 1, 2, 4, 8...
