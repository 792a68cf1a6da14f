# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""JSON over HTTP with keys, timeouts and errors that name the server and the route."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from torchtitan.grpo.inference.client import ServerError

API_KEY_VARIABLE = "TORCHTITAN_GRPO_API_KEY"
ADMIN_KEY_VARIABLE = "TORCHTITAN_GRPO_ADMIN_KEY"

_EXCERPT_CHARS = 600
_MAX_ANSWER_BYTES = 64 * 2**20


class RouteError(ServerError):
    """A route answered with a status that its caller did not accept.

    Attributes:
        status: The HTTP status; None where no answer came.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """An HTTP answer.

    Attributes:
        status: HTTP status.
        body: The parsed JSON; the text itself where it is not JSON; None where empty.
    """

    status: int
    body: Any


class HttpConnection:
    """One server's base URL, keys and session.

    The session belongs to the event loop of the first request.

    Args:
        url: Base URL, ``http://host:port``.
        api_key: Bearer key of generation routes, and of control routes without their own.
        admin_key: Bearer key of control routes.
        timeout_seconds: Bound of a request that names no other.
        idle_seconds: How long a connection is kept for the next request; 0 opens one for
            each. Servers close idle ones after some seconds, and what is just being written
            to one is lost: stay well below that. After an internal error none is kept.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        admin_key: str | None,
        timeout_seconds: float,
        idle_seconds: float = 0.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._idle_seconds = idle_seconds
        self._keys = {"generation": api_key, "control": admin_key or api_key}
        self._session: aiohttp.ClientSession | None = None
        self._num_using: Counter[aiohttp.ClientSession] = Counter()
        self._turn = asyncio.Lock()

    async def get(self, route: str, **options: Any) -> Answer:
        """GETs a control route, see :meth:`request`."""
        return await self.request("GET", route, **options)

    async def post(self, route: str, body: Any = None, **options: Any) -> Answer:
        """POSTs JSON to a control route, see :meth:`request`."""
        return await self.request("POST", route, body, **options)

    async def request(
        self,
        method: Literal["GET", "POST"],
        route: str,
        body: Any = None,
        *,
        scope: Literal["generation", "control"] = "control",
        timeout_seconds: float | None = None,
        max_bytes: int = _MAX_ANSWER_BYTES,
        accept: Collection[int] = (),
    ) -> Answer:
        """Makes one request.

        Args:
            method: HTTP method.
            route: Path and query, beginning with a slash.
            body: Sent as JSON; None sends no body.
            scope: Which key is presented.
            timeout_seconds: Bound of the whole exchange; None is the connection's own.
            max_bytes: A longer answer is not read to its end.
            accept: Statuses that are answers to the caller, besides 2xx.

        Raises:
            RouteError: No answer in time, no connection, another status, or an answer that is
                too long or no UTF-8.
        """
        timeout = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        key = self._keys[scope]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # One a turn of the event loop: a thousand that begin at once, at the start of a run or
        # when a server is lost, would together keep it from all else for a good while.
        async with self._turn:
            await asyncio.sleep(0)
        try:
            async with (
                self._used_session() as session,
                session.request(
                    method,
                    self.url + route,
                    json=body,
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=timeout),
                ) as response,
            ):
                status = response.status
                if status >= 500 and session is self._session:
                    # The server may be about to close the connection, which looks idle by
                    # then (uvicorn does, after telling of an error): what is written to it
                    # next would be lost.
                    self._session = None
                content = await _read(response, max_bytes)
        except TimeoutError as error:
            raise RouteError(
                f"{method} {self.url}{route} was not answered within {timeout:.1f} s."
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise RouteError(
                f"{method} {self.url}{route} failed: {type(error).__name__}: {error}. "
                "Is the server up, and is its URL right?"
            ) from error
        if content is None:
            raise RouteError(
                f"{method} {self.url}{route} must be answered with at most {max_bytes} bytes, "
                "and the answer is longer."
            )
        if not 200 <= status < 300 and status not in accept:
            text = content.decode(errors="replace")
            raise RouteError(_status_message(method, self.url + route, status, text), status)
        try:
            return Answer(status, _parse(content.decode()))
        except UnicodeDecodeError as error:
            raise RouteError(
                f"{method} {self.url}{route} must be answered in UTF-8: {error}", status
            ) from error

    async def close(self) -> None:
        """Closes all connections; a later request opens a new one."""
        sessions = {self._session, *self._num_using} - {None}
        self._session = None
        for session in sessions:
            assert session is not None
            await session.close()

    @asynccontextmanager
    async def _used_session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """The session; one that has been replaced is closed by its last request."""
        session = self._open_session()
        self._num_using[session] += 1
        try:
            yield session
        finally:
            self._num_using[session] -= 1
            if not self._num_using[session]:
                del self._num_using[session]
                if session is not self._session:
                    await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The number of requests in flight is the dispatcher's business: no limit here.
            # Connections are not kept unless asked for: what is written to one that the server
            # is just closing is lost, and a completion that is lost is made twice.
            kept: dict[str, Any] = {"force_close": True}
            if self._idle_seconds:
                kept = {"keepalive_timeout": self._idle_seconds}
            connector = aiohttp.TCPConnector(limit=0, **kept)
            # No proxy from the environment either: servers are addressed directly.
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session


def excerpt(value: Any) -> str:
    """The beginning of an answer, for an error message."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "..."


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """The whole answer; None where it is longer than ``max_bytes``."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            return None
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(text: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter where brackets are nested very deeply
        return text


def _status_message(method: str, address: str, status: int, text: str) -> str:
    hint = ""
    if status in (401, 403):
        hint = (
            " Check inference.api_key and inference.admin_key"
            f" ({API_KEY_VARIABLE}, {ADMIN_KEY_VARIABLE})."
        )
    return f"{method} {address} answered {status}: {excerpt(text)}{hint}"
