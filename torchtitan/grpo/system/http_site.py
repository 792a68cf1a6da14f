# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Serves an aiohttp application behind the limits of `connections.py`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

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


@web.middleware
async def answered(request: web.Request, handler: _Handler) -> web.StreamResponse:
    with answering():
        return await handler(request)


async def listen(
    runner: web.AppRunner,
    host: str,
    port: int,
    max_connections: int,
    header_seconds: float = HEADER_SECONDS,
    backlog: int = 128,
) -> asyncio.Server:
    """Listens for a runner that is set up. Handlers must run inside :func:`.connections.answering`."""
    assert runner.server is not None, "it was set up"
    server_logger.addFilter(_malformed)
    limits = ConnectionLimits(runner.server, max_connections, header_seconds)
    loop = asyncio.get_running_loop()
    return await loop.create_server(limits.make_protocol, host, port, backlog=backlog)


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Returns a body; raises HTTPRequestTimeout or HTTPRequestEntityTooLarge."""
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


class _Malformed(logging.Filter):
    """Leaves out what malformed requests hold, which may be a key, and most of their number."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._number += 1
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = (
            "%d malformed HTTP requests were refused so far (%s). What they hold is not shown."
        )
        record.args, record.exc_info = (self._number, type(error).__name__), None
        return self._number.bit_count() == 1  # 1, 2, 4, 8...


_malformed = _Malformed()
