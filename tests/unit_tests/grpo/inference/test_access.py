# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests are answered by their key, their origin and their content."""

import asyncio
import json
import socket
from typing import Any

import pytest

from torchtitan.grpo.inference.access import AuthLevel, Keys, RequestGuard, refusal

BOTH = Keys("user", "admin")
NORMAL, CONTROL, OPEN = AuthLevel.NORMAL, AuthLevel.CONTROL, AuthLevel.OPEN


def status(
    level: AuthLevel = CONTROL,
    keys: Keys = Keys(),  # noqa: B008
    method: str = "POST",
    local: str | None = "127.0.0.1",
    **headers: str,
) -> int:
    """Returns the status of a refusal, or 200; ``a_b`` stands for the header ``a-b``."""
    named = {"host": "127.0.0.1:8000"} | {n.replace("_", "-"): v for n, v in headers.items()}
    found = refusal(level, keys, method=method, headers=named, local_address=local)
    return 200 if found is None else found.status


@pytest.mark.parametrize(
    ("level", "keys", "right", "wrong"),
    [
        (NORMAL, BOTH, "user", "admin"),
        (CONTROL, BOTH, "admin", "user"),
        (CONTROL, Keys("user"), "user", "admin"),
        (CONTROL, Keys(None, "admin"), "admin", "user"),
    ],
)
def test_a_route_needs_its_own_key(level, keys, right, wrong) -> None:
    assert status(level, keys, authorization=f"Bearer {right}") == 200
    assert status(level, keys, authorization=f"bearer {right}") == 200
    for header in (f"Bearer {wrong}", right, f"Basic {right}", "Bearer ", "Bearer \udcff"):
        assert status(level, keys, authorization=header) == 401
    assert status(level, keys) == 401
    assert status(OPEN, keys) == 200


FAR = {"local": "10.0.0.5", "host": "10.0.0.5:8000"}
JSON = "application/json"
REQUESTS: list[tuple[int, dict[str, Any]]] = [
    # A server without keys answers only on loopback; a key for control leaves generation open.
    *((200, {"level": level, "local": local}) for level in (NORMAL, CONTROL) for local in ("::1", None)),
    *((403, {"level": level, **FAR}) for level in (NORMAL, CONTROL)),
    (200, {"level": OPEN, **FAR}),
    (403, {"level": NORMAL, "keys": Keys(None, "admin"), **FAR}),
    # Names of this machine are its own. A page can give its own name the address 127.0.0.1, and its
    # browser then asks this server.
    *((200, {"host": host}) for host in ("127.1.2.3", "LOCALHOST:1", "[::1]:8000", socket.gethostname())),
    *((403, {"host": host}) for host in ("evil.example:8000", "10.0.0.5", "localhost.evil.example", "[::1")),
    (403, {"level": OPEN, "host": "evil.example:8000"}),
    (200, {"keys": BOTH, "authorization": "Bearer admin", "local": "10.0.0.5", "host": "gpu-7:8000"}),
    # Other web pages.
    *((403, {"origin": origin}) for origin in ("http://evil.example", "null", "http://127.0.0.1:9000")),
    (403, {"level": NORMAL, "method": "OPTIONS", "origin": "http://evil.example"}),
    (200, {"origin": "http://127.0.0.1:8000"}),
    *((403, {"method": "GET", "sec_fetch_site": site}) for site in ("cross-site", "same-site")),
    (200, {"method": "GET", "sec_fetch_site": "none"}),
    # A body must be JSON, which no page can send without being asked first.
    (200, {"content_type": JSON, "content_length": "9"}),
    (200, {"content_type": f'{JSON};charset="utf-8"', "content_length": "9"}),
    (415, {"content_type": f"{JSON}; charset=utf-16", "content_length": "9"}),
    (415, {"content_type": "text/plain", "content_length": "0"}),
    (200, {"method": "GET", "content_type": "text/plain", "content_length": "9"}),
    (415, {"content_type": "multipart/form-data; boundary=x", "content_length": "9"}),
    (415, {"content_type": "application/octet-stream", "content_length": "9"}),
    (200, {"content_type": "application/octet-stream", "content_length": "0"}),
    (415, {"content_type": "", "content_length": "9"}),
    (200, {"content_type": "", "content_length": "0"}),
    (415, {"transfer_encoding": "chunked"}),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "request_"), REQUESTS)
def test_requests_are_answered_or_refused(expected: int, request_: dict[str, Any]) -> None:
    assert status(**request_) == expected


# -- the guard of ASGI servers --------------------------------------------------------


def call(path: str, **scope: Any) -> tuple[list[dict[str, Any]], bool]:
    """Returns what a guard sends, and whether the application behind it was called."""
    sent: list[dict[str, Any]] = []
    called = []

    async def app(scope, receive, send) -> None:
        called.append(scope["path"])

    async def receive() -> dict[str, Any]:
        called.append("body")
        return {"type": "http.request"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    guard = RequestGuard(app, open_routes=["/health"], generation_routes=["/v1/models"], keys=BOTH)
    full = {"type": "http", "method": "GET", "path": path, "server": ("127.0.0.1", 8000)}
    full |= {"headers": [(b"host", b"127.0.0.1:8000")]} | scope
    asyncio.run(guard(full, receive, send))
    is_open = path == "/health"
    assert "body" not in called or (path in called and not is_open), "it is kept in memory"
    return sent, path in called


@pytest.mark.parametrize(
    ("path", "level"),
    [
        ("/health", OPEN),
        ("/health/", CONTROL),
        ("/v1/models", NORMAL),
        ("/v1/models/tiny", NORMAL),
        ("/v1/models_of_mine", CONTROL),
        ("/v1/load_lora_adapter", CONTROL),
        ("/collective_rpc", CONTROL),
        ("//v1/models", CONTROL),
        ("/", CONTROL),
    ],
)
def test_the_guard_asks_for_the_admin_key_on_every_route_that_it_does_not_know(path, level) -> None:
    for key in ("user", "admin", None):
        headers = [(b"host", b"localhost")]
        headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
        sent, is_answered = call(path, headers=headers)
        assert is_answered == (level is OPEN or key == BOTH.of(level))
        if not is_answered:
            assert sent[0]["status"] == 401
            assert "Unauthorized" in json.loads(sent[1]["body"])["error"]["message"]


def test_keys_may_have_any_letters_and_headers_any_bytes() -> None:
    keys = Keys("schlüssel")
    assert status(NORMAL, keys, authorization="Bearer schlüssel") == 200
    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer \xff"), (b"\xff", b"\xff")]
    assert call("/v1/models", headers=headers)[0][0]["status"] == 401


def test_the_guard_closes_websockets_and_lets_the_server_start() -> None:
    assert call("/v1/realtime", type="websocket") == (
        [{"type": "websocket.close", "code": 1008}],
        False,
    )
    assert call("", type="lifespan")[1]


def test_a_unix_socket_is_local_and_a_root_path_is_not_part_of_the_route() -> None:
    assert call("/health", server=("/tmp/socket", None))[1]
    assert call("/api/health", root_path="/api")[1]
