# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A vLLM server whose control routes are open is told apart from one with the guard."""

import socket

import pytest
from aiohttp import web

from torchtitan.grpo.inference.http import HttpConnection
from torchtitan.grpo.inference.vllm.examine import NO_GUARD, Examined, _examine_control

KEY = "secret"


@pytest.mark.parametrize(
    ("is_open", "key", "expected"),
    [(True, KEY, [NO_GUARD]), (False, KEY, []), (True, None, [])],
)
async def test_a_server_that_is_open_although_the_run_has_keys_is_a_warning(
    is_open: bool, key: str | None, expected: list[str]
) -> None:
    async def weight_info(request: web.Request) -> web.Response:
        is_allowed = is_open or request.headers.get("Authorization") == f"Bearer {KEY}"
        return web.json_response({"weight_version": "1"}, status=200 if is_allowed else 401)

    app = web.Application()
    app.router.add_get("/weight_info", weight_info)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await web.SockSite(runner, listener).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        http = HttpConnection(url, api_key=None, admin_key=key, timeout_seconds=60)
        found = Examined()
        await _examine_control(http, found)
        await http.close()
        await runner.cleanup()
    assert found.warnings == expected
