# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
from collections import Counter

from aiohttp import web

from torchtitan.grpo.inference.http import HttpConnection

_NUM_REQUESTS = 40
_TIMEOUT_SECONDS = 60.0


class _CountingConnection(HttpConnection):
    """Counts the requests that begin in each turn of the event loop."""

    def __init__(self, url: str) -> None:
        super().__init__(url, api_key=None, admin_key=None, timeout_seconds=_TIMEOUT_SECONDS)
        self.turn = 0
        self.begun: Counter[int] = Counter()

    async def count_turns(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1

    def _open_session(self):
        self.begun[self.turn] += 1
        return super()._open_session()


async def _ask_at_once() -> Counter[int]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    connection = _CountingConnection(f"http://127.0.0.1:{runner.addresses[0][1]}")
    turns = asyncio.create_task(connection.count_turns())
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            answers = await asyncio.gather(*(connection.post("/") for _ in range(_NUM_REQUESTS)))
        assert [a.status for a in answers] == [200] * _NUM_REQUESTS
    finally:
        turns.cancel()
        await connection.close()
        await runner.cleanup()
    return connection.begun


def test_requests_that_come_at_once_begin_one_a_turn_of_the_loop():
    begun = asyncio.run(_ask_at_once())
    assert sum(begun.values()) == _NUM_REQUESTS
    assert max(begun.values()) == 1
