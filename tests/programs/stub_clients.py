# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Clients of servers that are objects of the test, and HTTP servers."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from torchtitan.grpo.inference.client import InferenceClient


class StubClient(InferenceClient):
    """Has each method of a client; those that a test needs are overridden."""

    async def _none(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this server does only what its test needs")

    abort = generate = health = load = version = num_workers = pause = resume = rate = _none
    describe = join_weight_group = leave_weight_groups = begin_update = _none
    receive_bucket = commit_update = update_from_disk = close = _none


@asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
