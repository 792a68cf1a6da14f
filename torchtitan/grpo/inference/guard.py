# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Stands before the routes of a vLLM or SGLang server, and refuses what `access.py` refuses.

It also limits connections (`system/connections.py`) and the time for bodies. It is plain ASGI and
needs only the standard library, because the servers' environments lack the trainer's libraries.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from torchtitan.grpo.inference.access import AuthLevel, Keys, Refusal, keys_of_environment, refusal
from torchtitan.grpo.system.connections import (
    MAX_CONNECTIONS,
    SLOW_BODY,
    ConnectionLimits,
    answering,
    body_seconds,
    raise_descriptor_limit,
)

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]


class RequestGuard:
    """ASGI middleware that asks for the admin key on every route that it does not know."""

    def __init__(
        self,
        app: Callable[[_Scope, _Receive, _Send], Awaitable[None]],
        *,
        open_routes: Collection[str],
        generation_routes: Collection[str],
        keys: Keys | None = None,
    ) -> None:
        self._app = app
        self._open = frozenset(open_routes)
        self._generation = frozenset(generation_routes)
        self._keys = keys if keys is not None else keys_of_environment()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # the start and the end of the server
            _limit_connections()
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused is None:
            with answering(has_key=self._keys.of(self._level(scope)) is not None):
                await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(refused, send)

    def level_of(self, path: str) -> AuthLevel:
        if path in self._open:
            return AuthLevel.OPEN
        parts = path.split("/")
        above = {"/".join(parts[: i + 1]) for i in range(1, len(parts))}
        return AuthLevel.CONTROL if self._generation.isdisjoint(above) else AuthLevel.NORMAL

    async def _answer(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        # A body that needs no key is not kept in memory, and no open route waits for one.
        if scope["type"] == "http" and self._level(scope) is not AuthLevel.OPEN:
            try:
                messages = iter(await _whole_body(receive))
            except TimeoutError:
                await _answer(Refusal(408, SLOW_BODY), send)
                return

            async def receive_next() -> Any:
                return next(messages, None) or await receive()

            await self._app(scope, receive_next, send)
        else:
            await self._app(scope, receive, send)

    def _level(self, scope: _Scope) -> AuthLevel:
        return self.level_of(scope["path"].removeprefix(scope.get("root_path", "")))

    def _refusal(self, scope: _Scope) -> Refusal | None:
        # As aiohttp decodes them for the embedded server.
        headers = {
            name.decode("ascii", "replace"): value.decode(errors="surrogateescape")
            for name, value in scope["headers"]
        }
        server = scope.get("server")
        return refusal(
            self._level(scope),
            self._keys,
            method=scope.get("method", "GET"),
            headers=headers,
            # The second element is the port; a Unix socket has none.
            local_address=server[0] if server and server[1] is not None else None,
        )


def _limit_connections() -> None:
    """Puts limits before the sockets of uvicorn, which says that it starts before it listens."""
    loop: Any = asyncio.get_running_loop()
    create_server, most = loop.create_server, raise_descriptor_limit(MAX_CONNECTIONS)
    if getattr(create_server, "has_limits", False):
        return

    def limited(make_protocol: Any, *args: Any, **options: Any) -> Awaitable[Any]:
        if getattr(make_protocol, "__module__", None) == "uvicorn.server":
            make_protocol = ConnectionLimits(make_protocol, most).make_protocol
        return create_server(make_protocol, *args, **options)

    limited.has_limits = True  # pyright: ignore[reportFunctionMemberAccess]
    loop.create_server = limited


async def _whole_body(receive: _Receive) -> list[Any]:
    """The last message tells if the client has left. Raises TimeoutError if the body is slow."""
    begun, num_bytes, messages = asyncio.get_running_loop().time(), 0, []
    while not messages or messages[-1].get("more_body", False):
        async with asyncio.timeout_at(begun + body_seconds(num_bytes)):
            messages.append(await receive())
        num_bytes += len(messages[-1].get("body", b""))
    return messages


async def _answer(refused: Refusal, send: _Send) -> None:
    error = {"message": refused.message, "code": refused.status}
    body = json.dumps({"error": error}, allow_nan=False).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        # The body of the request was not read, so nothing can follow it.
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
