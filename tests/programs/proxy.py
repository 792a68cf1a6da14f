# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A proxy in front of an embedded server, and one that keeps what is sent and written."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

_MAX_BODY_BYTES = 64 * 2**20
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    body: bytes


class Proxy:
    """Forwards every request to ``target``, and its answer to whoever asked."""

    def __init__(self, target: str) -> None:
        self.url = ""
        self._target = target
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    async def on_answer(
        self, request: web.Request, sent: bytes, answer: Answer
    ) -> web.StreamResponse | None:
        """May return another response than the server's answer."""

    def on_given_up(self, request: web.Request) -> None:
        """Is called if the client goes before the server has answered."""

    async def __aenter__(self) -> "Proxy":
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        # Whoever asks decides how long it may take: it goes, and its request is cancelled.
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: Any) -> None:
        assert self._runner is not None and self._session is not None
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        sent = await request.read()
        headers = {"Content-Type": request.content_type} if sent else {}
        try:
            async with self._session.request(
                request.method, self._target + request.path_qs, data=sent or None, headers=headers
            ) as got:
                answer = Answer(got.status, got.content_type, await got.read())
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=f"The server behind the proxy: {error!r}")
        except asyncio.CancelledError:
            self.on_given_up(request)
            raise
        if (response := await self.on_answer(request, sent, answer)) is not None:
            return response
        return web.Response(
            status=answer.status, body=answer.body, content_type=answer.content_type
        )


class RecordingProxy(Proxy):
    """``seen`` holds each context with the tokens that were written behind it, and their logprobs."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.seen: list[tuple[list[int], list[int], list[float]]] = []

    async def on_answer(self, request: web.Request, sent: bytes, answer: Answer) -> None:
        if request.path == "/generate" and answer.status == 200:
            body = json.loads(answer.body)
            logprobs = [entry[0] for entry in body["meta_info"]["output_token_logprobs"]]
            self.seen.append((json.loads(sent)["input_ids"], body["output_ids"], logprobs))


@contextmanager
def running_beside(proxy: Proxy) -> Iterator[Proxy]:
    """Runs a proxy on a thread of its own, for tests that wait for other processes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result(_START_SECONDS)
        yield proxy
        asyncio.run_coroutine_threadsafe(proxy.__aexit__(), loop).result(_START_SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_START_SECONDS)
        loop.close()
