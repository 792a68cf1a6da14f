# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Stands before the HTTP routes of a vLLM or SGLang server, and refuses what `access.py` refuses.

Both servers are ASGI applications, and their environments lack the libraries of the trainer. The
guard is therefore plain ASGI and needs the standard library alone. It reads the keys from the
environment of the server.
"""

import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from torchtitan.grpo.inference.access import (
    AuthLevel,
    Keys,
    Refusal,
    keys_of_environment,
    refusal,
)

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]


class RequestGuard:
    """ASGI middleware that asks for the admin key on every route that it does not know.

    Args:
        app: The application behind the guard.
        open_routes: Paths that need no key.
        generation_routes: Paths, with all paths below them, that need the generation key.
        keys: Keys of the server; ``None`` reads them from the environment.
    """

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
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(refused, send)

    def level_of(self, path: str) -> AuthLevel:
        """Returns which key a path needs."""
        if path in self._open:
            return AuthLevel.OPEN
        parts = path.split("/")
        above = {"/".join(parts[: i + 1]) for i in range(1, len(parts))}
        return AuthLevel.CONTROL if self._generation.isdisjoint(above) else AuthLevel.NORMAL

    def _refusal(self, scope: _Scope) -> Refusal | None:
        # As aiohttp decodes them for the embedded server.
        headers = {
            name.decode("ascii", "replace"): value.decode(errors="surrogateescape")
            for name, value in scope["headers"]
        }
        server = scope.get("server")
        return refusal(
            self.level_of(scope["path"].removeprefix(scope.get("root_path", ""))),
            self._keys,
            method=scope.get("method", "GET"),
            headers=headers,
            # The second element is the port; a Unix socket has none.
            local_address=server[0] if server and server[1] is not None else None,
        )


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
