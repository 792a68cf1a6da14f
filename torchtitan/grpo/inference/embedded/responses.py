# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reading JSON requests and writing JSON answers in SGLang's form."""

import asyncio
import json
from typing import Any

from aiohttp import web

# A body of the longest prompt takes far less over any network.
_BODY_SECONDS = 60.0


async def json_body(http: web.Request) -> dict[str, Any]:
    """Returns the JSON object in the body of a request; an empty body is an empty object.

    Raises:
        ValueError: If the body is something else, or does not arrive in time.
    """
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            text = (await http.read()).decode()
        body = json.loads(text) if text.strip() else {}
    except TimeoutError as error:
        raise ValueError(f"The body must arrive within {_BODY_SECONDS:g} s.") from error
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
