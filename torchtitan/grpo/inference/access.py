# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides whether a server answers a request, by the request's origin, form and key.

All kinds of servers use this module, vLLM and SGLang through :class:`RequestGuard`. Their environments lack
the trainer's libraries, so it imports little. Any web page that is open on the server's machine can make the
browser send requests to the server. Such a request names a foreign page in ``Origin``, or a foreign name in
``Host`` (DNS rebinding), or cannot have a JSON body. All three are refused, also on servers without keys.
"""

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from torchtitan.grpo.system.connections import (
    MAX_CONNECTIONS,
    SLOW_BODY,
    ConnectionLimits,
    answering,
    body_seconds,
    raise_descriptor_limit,
)
from torchtitan.grpo.system.network import is_loopback

API_KEY_VARIABLE = "TORCHTITAN_GRPO_API_KEY"
TEACHER_KEY_VARIABLE = "TORCHTITAN_GRPO_TEACHER_KEY"
ADMIN_KEY_VARIABLE = "TORCHTITAN_GRPO_ADMIN_KEY"

_METHODS_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
_JSON = "application/json"
# What clients write for a body that they do not have.
_NO_TYPE = ("", "application/octet-stream")


class AuthLevel(Enum):
    """The key that a route needs: none, the API key, or the admin key (if that is not set, the API key)."""

    OPEN = "open"
    NORMAL = "normal"
    CONTROL = "control"


@dataclass(frozen=True)
class Keys:
    api_key: str | None = None
    admin_key: str | None = None

    def of(self, level: AuthLevel) -> str | None:
        if level is AuthLevel.OPEN:
            return None
        return (self.admin_key or self.api_key) if level is AuthLevel.CONTROL else self.api_key


def keys_of_environment() -> Keys:
    return Keys(os.environ.get(API_KEY_VARIABLE), os.environ.get(ADMIN_KEY_VARIABLE))


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str


def refusal(
    level: AuthLevel,
    keys: Keys,
    *,
    method: str,
    headers: Mapping[str, str],
    local_address: str | None,
) -> Refusal | None:
    """Returns why a request is refused, or None. ``local_address`` is ``None`` for a Unix socket."""
    is_local = is_loopback(local_address)
    host = headers.get("host", "")
    if is_local and not _is_own_name(host):
        return Refusal(
            403, f"Host must be this machine's own name or a loopback address, got {host!r:.80}."
        )
    if (found := _foreign_page(headers, host)) is not None:
        return Refusal(403, f"Requests of other web pages are refused, got {found}.")
    expected = keys.of(level)
    if level is not AuthLevel.OPEN and not is_local and not expected:
        return Refusal(
            403,
            "Without a key for it, this route answers on the loopback interface alone. Start the "
            f"server with {API_KEY_VARIABLE} and {ADMIN_KEY_VARIABLE} in its environment.",
        )
    if expected and not _is_bearer(headers.get("authorization", ""), expected):
        name = "admin key" if level is AuthLevel.CONTROL and keys.admin_key else "API key"
        return Refusal(401, f"Unauthorized: send 'Authorization: Bearer KEY' with the {name}.")
    return _wrong_content(method, headers)


def _is_bearer(authorization: str, expected: str) -> bool:
    scheme, _, token = authorization.partition(" ")
    sent = token.encode(errors="surrogateescape")  # headers may hold any bytes
    return scheme.lower() == "bearer" and secrets.compare_digest(sent, expected.encode())


def require_keys(host: str, environ: Mapping[str, str]) -> None:
    if not is_loopback(host) and not environ.get(API_KEY_VARIABLE):
        raise ValueError(
            f"--host {host} needs keys, because every machine that reaches this one could otherwise "
            f"replace the weights. Set {API_KEY_VARIABLE}, and {ADMIN_KEY_VARIABLE} for routes that "
            "control the server, in the environment of server and trainer, or serve on --host "
            "127.0.0.1."
        )


def _is_own_name(host: str) -> bool:
    if not host:
        return True  # a browser always sends one
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name == socket.gethostname().lower()


def _foreign_page(headers: Mapping[str, str], host: str) -> str | None:
    """Returns the header showing that another server's web page sent the request, or None without one."""
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host.lower():
        return f"Origin {origin!r:.80}"
    site = headers.get("sec-fetch-site")
    return f"Sec-Fetch-Site {site!r:.20}" if site in ("cross-site", "same-site") else None


def _netloc(url: str) -> str:
    """Returns host and port of a URL; empty if the URL has none, like the origin ``null``."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _wrong_content(method: str, headers: Mapping[str, str]) -> Refusal | None:
    if method in _METHODS_WITHOUT_BODY:
        return None
    kind, _, parameters = headers.get("content-type", "").partition(";")
    kind, charset = kind.strip().lower(), _charset_of(parameters)
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if kind != _JSON and (has_body or kind not in _NO_TYPE):
        return Refusal(415, f"Content-Type must be {_JSON}, got {kind or 'none'!r:.80}.")
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        return Refusal(415, f"The charset of Content-Type must be utf-8, got {charset!r:.80}.")
    return None


def _charset_of(parameters: str) -> str:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("\"'").lower()
    return ""


_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]


class RequestGuard:
    """ASGI middleware before the routes of a vLLM or SGLang server.

    It refuses what :func:`refusal` refuses, and limits connections (`system/connections.py`) and the time
    for bodies. Every route that is not named to it needs the admin key.
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
    """Limits uvicorn's connections. Must be called at uvicorn's startup event, before uvicorn listens."""
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
    """Returns all ASGI messages of a request's body. The last message says if the client has left.

    Raises TimeoutError if the body arrives too slowly.
    """
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
