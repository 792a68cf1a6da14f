# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reading JSON requests and writing JSON answers in SGLang's form."""

import json
from typing import Any

from aiohttp import web

from torchtitan.grpo.system.http_site import read_body

# A body of the longest prompt takes far less over any network.
# Far above any prompt: a million token ids take 6 MB.
_MAX_BODY_BYTES = 16 * 2**20


async def json_body(http: web.Request) -> dict[str, Any]:
    """Returns the JSON object in the body of a request; an empty body is an empty object.

    Raises:
        ValueError: If the body is something else.
        web.HTTPException: If it is too long or arrives too slowly.
    """
    try:
        text = (await read_body(http, _MAX_BODY_BYTES)).decode()
        body = json.loads(text) if text.strip() else {}
    except RecursionError as error:
        raise ValueError("The body must be JSON with fewer brackets in each other.") from error
    except ValueError as error:  # also of bytes that are not UTF-8
        raise ValueError(f"The body must be JSON in UTF-8: {error}.") from error
    if not isinstance(body, dict):
        raise ValueError(f"The body must be a JSON object, got {type(body).__name__}.")
    return body


def local_address(http: web.Request) -> str | None:
    """Returns the address of this machine at which a request arrived."""
    transport = http.transport
    name = transport.get_extra_info("sockname") if transport is not None else None
    return name[0] if isinstance(name, tuple) else None


def success(message: str, **more: Any) -> web.Response:
    return web.json_response({"success": True, "message": message, **more})


def error_response(status: int, message: str) -> web.Response:
    return web.json_response(
        {"success": False, "message": message, "error": {"message": message, "code": status}},
        status=status,
    )
