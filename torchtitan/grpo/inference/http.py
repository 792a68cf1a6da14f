# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""JSON over HTTP, with keys, timeouts and errors that name the server and the route.

Redirections are not followed, because they would send prompts, and perhaps keys, to another server.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from torchtitan.grpo.inference.access import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from torchtitan.grpo.inference.client import Capabilities, InferenceClient, ServerError
from torchtitan.grpo.system.connections import body_seconds
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

logger = logging.getLogger(__name__)

_EXCERPT_CHARS = 600
_MAX_ANSWER_BYTES = 64 * 2**20
_KEY_HINT = (
    f"Check inference.api_key and inference.admin_key ({API_KEY_VARIABLE}, {ADMIN_KEY_VARIABLE})."
)


class RouteError(ServerError):
    """A route answered with an error, or did not answer (``status`` and ``body`` are then ``None``)."""

    def __init__(self, message: str, status: int | None = None, body: Any = None) -> None:
        super().__init__(message)
        self.status, self.body = status, body
        self.was_answered = status is not None

    @property
    def is_refusal(self) -> bool:
        """True if repeating the same request would be useless, because it would be refused again."""
        if self.status in (408, 429):  # it was sent too slowly, or there were too many
            return False
        return self.status is not None and 300 <= self.status < 500


@dataclass(frozen=True)
class Answer:
    """Status and body of a response. The body is parsed JSON, text if it is not JSON, or ``None`` if empty."""

    status: int
    body: Any


class HttpConnection:
    """URL, keys and HTTP session of one server. The session belongs to the event loop of the first request.

    Control routes get ``admin_key``, or ``api_key`` if there is none. ``key_hint`` is appended to the message
    if a key is refused. An idle TCP connection is kept for ``idle_seconds``; with 0, each request opens its
    own. ``idle_seconds`` must be well below the time after which the server closes idle connections,
    because a request that arrives while the server closes its connection is lost.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        admin_key: str | None,
        timeout_seconds: float,
        idle_seconds: float = 0.0,
        proxy: str | None = None,
        key_hint: str = _KEY_HINT,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._idle_seconds, self._proxy, self._key_hint = idle_seconds, proxy, key_hint
        self.has_keys = bool(api_key or admin_key)
        self._keys = {"generation": api_key, "control": admin_key or api_key, "public": None}
        self._session: aiohttp.ClientSession | None = None
        self._num_using: Counter[aiohttp.ClientSession] = Counter()
        self._turn = asyncio.Lock()

    async def get(self, route: str, **options: Any) -> Answer:
        return await self.request("GET", route, **options)

    async def post(self, route: str, body: Any = None, **options: Any) -> Answer:
        return await self.request("POST", route, body, **options)

    async def request(
        self,
        method: str,
        route: str,
        body: Any = None,
        *,
        scope: Literal["generation", "control", "public"] = "control",
        timeout_seconds: float | None = None,
        max_bytes: int = _MAX_ANSWER_BYTES,
        accept: Collection[int] = (),
    ) -> Answer:
        """Sends one request, with ``body`` as JSON unless ``None``, and returns the answer.

        ``scope`` names the key that is sent; ``public`` sends none. ``timeout_seconds``, or else
        the connection's, bounds the whole exchange. An answer longer than ``max_bytes`` is refused
        and not read to its end. Raises :class:`RouteError` for a status that is neither 2xx nor in
        ``accept``.
        """
        timeout = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        subject = f"{method} {self.url}{route}"
        status, content = await self._exchange(
            method, route, body, self._keys[scope], timeout, max_bytes
        )
        if content is None:
            raise RouteError(
                f"{subject} must be answered with at most {max_bytes} bytes, and the answer is "
                "longer."
            )
        if not 200 <= status < 300 and status not in accept:
            text = content.decode(errors="replace")
            hint = f" {self._key_hint}" if status in (401, 403) else ""
            message = f"{subject} answered {status}: {excerpt(text)}{hint}"
            raise RouteError(message, status, _parse(text))
        try:
            return Answer(status, _parse(content.decode()))
        except UnicodeDecodeError as error:
            raise RouteError(f"{subject} must be answered in UTF-8: {error}", status) from error

    async def _exchange(
        self, method: str, route: str, body: Any, key: str | None, timeout: float, max_bytes: int
    ) -> tuple[int, bytes | None]:
        subject = f"{method} {self.url}{route}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Only one request begins in each turn of the event loop. A thousand that begin at once,
        # at the start of a run or when a server is lost, would block everything else meanwhile.
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
                    allow_redirects=False,
                    proxy=self._proxy,
                ) as response,
            ):
                if 300 <= response.status < 400:
                    location = response.headers.get("Location", "nowhere")
                    raise RouteError(
                        f"{subject} answered {response.status}, a redirection to {location!r:.300}, "
                        "which is not followed. Configure the URL of the server itself, and check what "
                        "answers at that address.",
                        response.status,
                    )
                if response.status >= 500 and session is self._session:
                    # The server may be about to close this connection (uvicorn does so after an
                    # internal error), and the next request on it would be lost.
                    self._session = None
                return response.status, await _read(response, max_bytes, timeout)
        except _SlowAnswer as error:
            raise RouteError(f"{subject} was answered too slowly: {error}.") from error
        except TimeoutError as error:
            raise RouteError(f"{subject} was not answered within {timeout:.1f} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            # Whatever ended a connection in the middle was there.
            is_doubtful = isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL)
            doubt = " Is the server up, and is its URL right?" if is_doubtful else ""
            raise RouteError(
                f"{subject} failed: {type(error).__name__}: {error}.{doubt}"
            ) from error

    async def close(self) -> None:
        sessions, self._session = {self._session, *self._num_using}, None
        for session in sessions:
            if session is not None:
                await session.close()

    @asynccontextmanager
    async def _used_session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yields the current session. A session that was replaced meanwhile is closed after its last request."""
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
            # No limit: the dispatcher bounds the number of requests in flight.
            kept: dict[str, Any] = {"force_close": True}
            if self._idle_seconds:
                kept = {"keepalive_timeout": self._idle_seconds}
            connector = aiohttp.TCPConnector(limit=0, **kept)
            # trust_env=False: without a proxy of the connection, servers are reached directly.
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session


class HttpClient(InferenceClient):
    def __init__(
        self, http: HttpConnection, capabilities: Capabilities, *, request_timeout_seconds: float
    ) -> None:
        self.url, self.capabilities = http.url, capabilities
        self._http = http
        self._request_timeout_seconds = request_timeout_seconds
        self._groups: dict[str, WeightGroupInfo] = {}
        self._one_bucket = asyncio.Lock()
        self._sequences: Counter[str] = Counter()
        self._update_marked = False

    async def _ask_model(
        self, route: str, body: dict[str, Any], max_bytes: int, request_id: str | None = None
    ) -> Any:
        """Sends a request to the model, and returns the body of the answer.

        Aborts the request on the server if the call is cancelled or no answer comes.
        """
        try:
            answer = await self._http.post(
                route,
                body,
                scope="generation",
                timeout_seconds=self._request_timeout_seconds,
                max_bytes=max_bytes,
            )
        except (asyncio.CancelledError, RouteError) as error:
            was_answered = isinstance(error, RouteError) and error.was_answered
            if request_id is not None and not was_answered:
                await asyncio.shield(self._abort_quietly(request_id))
            raise
        return answer.body

    async def _abort_quietly(self, request_id: str) -> None:
        try:
            await self.abort(request_id)
        except ServerError as error:
            # Only logged, because the caller raises the error that led here.
            logger.warning("Request %s could not be aborted: %s", request_id, error)

    async def _model_card(self) -> dict[str, Any]:
        """Returns the served model's entry in ``/v1/models``."""
        answer = await self._http.get("/v1/models", scope="generation")
        with contextlib.suppress(LookupError, TypeError):
            if isinstance(card := answer.body["data"][0], dict):
                return card
        raise ServerError(
            f"{self.url}/v1/models must list the served model, got {excerpt(answer.body)}"
        )

    def _joined(self, group_name: str) -> WeightGroupInfo:
        if group_name not in self._groups:
            raise ServerError(
                f"{self.url} has not joined weight group {group_name}; join before pushing."
            )
        return self._groups[group_name]

    def _next_sequence(self, group_name: str) -> int:
        """Returns the number of a group's next bucket. Call it before any ``await``, to keep their order."""
        self._sequences[group_name] += 1
        return self._sequences[group_name] - 1

    async def close(self) -> None:
        await self._http.close()


def excerpt(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, allow_nan=True)
    return text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "..."


class _SlowAnswer(Exception):
    """The first bytes of an answer have arrived, but the rest arrives too slowly."""


async def _read(response: aiohttp.ClientResponse, max_bytes: int, timeout: float) -> bytes | None:
    """Returns the body of an answer, or ``None`` if it is longer than ``max_bytes``."""
    # A proxy may send the headers long before the server has generated the answer.
    content, begun = bytearray(await response.content.readany()), asyncio.get_running_loop().time()
    while len(content) <= max_bytes:
        try:
            async with asyncio.timeout_at(begun + body_seconds(len(content), timeout)) as limit:
                chunk = await response.content.readany()
        except TimeoutError as error:
            if not limit.expired():  # it is the request's own
                raise
            raise _SlowAnswer(f"{len(content)} bytes had arrived when it stalled") from error
        if not chunk:
            return bytes(content)
        content += chunk
    return None


def _parse(text: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: brackets are nested very deeply
        return text
