# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Receives, over HTTP, the registrations of servers that share no disk with the trainer.

``PUT /servers`` writes a registration file and ``DELETE /servers`` removes it. Both take the
registration as JSON, and need the admin key; see `inference/registry.py`.
"""

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable

from aiohttp import web

from torchtitan.grpo.inference.registry import Registration, RegistryFolder, parse_registration
from torchtitan.grpo.inference.urls import split_address
from torchtitan.grpo.system.http_site import HttpSite, answered, read_body

logger = logging.getLogger(__name__)

_MAX_BYTES = 4096
_MAX_CONNECTIONS = 512


class RegistryServer:
    """Listens on ``inference.registry_address``. Requests must carry the admin key."""

    def __init__(self, address: str, key: str, folder: RegistryFolder) -> None:
        self._host, self._port = split_address(address)
        self._key = key
        app = web.Application(middlewares=[answered])
        app.router.add_put("/servers", functools.partial(self._change, folder.write))
        app.router.add_delete("/servers", functools.partial(self._change, folder.remove))
        self._site = HttpSite(app)

    async def start(self) -> None:
        try:
            await self._site.start(self._host, self._port, _MAX_CONNECTIONS)
        except OSError as error:
            raise ValueError(
                "inference.registry_address must be a free port on an address of rank 0's host, got "
                f"{self._host}:{self._port}: {error}."
            ) from error

    async def close(self) -> None:
        await self._site.close()

    async def _change(
        self, change: Callable[[Registration], None], request: web.Request
    ) -> web.Response:
        given = request.headers.get("Authorization", "").encode()
        if not secrets.compare_digest(given, f"Bearer {self._key}".encode()):
            return web.Response(status=401, text="The admin key is missing or wrong.")
        if request.content_type != "application/json":
            return web.Response(status=415, text="A registration must be sent as application/json.")
        try:
            registration = parse_registration(await read_body(request, _MAX_BYTES))
            await asyncio.to_thread(change, registration)
        except ValueError as error:
            return web.Response(status=400, text=str(error))
        except OSError as error:
            logger.error("A server could not be registered: %s", error)
            return web.Response(status=507, text=f"The registry cannot be written: {error}.")
        return web.Response(status=204)
