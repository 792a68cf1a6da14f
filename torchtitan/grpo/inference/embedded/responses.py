# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reading JSON requests and writing JSON answers in SGLang's form."""

import json
from typing import Any

from aiohttp import web


async def json_body(http: web.Request) -> dict[str, Any]:
    text = await http.text()
    try:
        body = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"The body must be JSON: {error}.") from error
    if not isinstance(body, dict):
        raise ValueError(f"The body must be a JSON object, got {type(body).__name__}.")
    return body


def success(message: str, **more: Any) -> web.Response:
    return web.json_response({"success": True, "message": message, **more})


def error_response(status: int, message: str) -> web.Response:
    return web.json_response(
        {"success": False, "message": message, "error": {"message": message, "code": status}},
        status=status,
    )
