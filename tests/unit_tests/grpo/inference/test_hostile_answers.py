# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Servers that point elsewhere, or whose answers never end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from stub_clients import answering

from torchtitan.grpo.inference import serve
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import HttpConnection, RouteError
from torchtitan.grpo.inference.join_check import identify
from torchtitan.grpo.inference.kinds import KINDS, make_client
from torchtitan.grpo.inference.registry import Registration
from torchtitan.grpo.inference.serve import Registrar
from torchtitan.grpo.system import connections
from torchtitan.grpo.types import GenerateRequest

SECONDS = 60.0
SOON = 0.3
ONE = Registration("http://127.0.0.1:8000", "embedded", "host", 1, 1.0)


def connection(url: str, timeout_seconds: float = SECONDS) -> HttpConnection:
    return HttpConnection(url, api_key="secret", admin_key="admin", timeout_seconds=timeout_seconds)


async def ask(url: str, how: str) -> None:
    requests: dict[str, Callable[[HttpConnection], Awaitable[Any]]] = {
        "get": lambda client: client.get("/health"),
        "post": lambda client: client.post("/pause", {}),
        "identify": identify,
    }
    client = connection(url) if how in requests else make_client(how, url)  # pyright: ignore
    try:
        if isinstance(client, HttpConnection):
            await requests[how](client)
        else:
            await client.generate(GenerateRequest("a", [1, 2], 4))
    finally:
        await client.close()


def redirection(status: int, location: str) -> list[bytes]:
    return [f"HTTP/1.1 {status} Found\r\n{location}Content-Length: 0\r\n\r\n".encode()]


@pytest.mark.parametrize("how", ["get", "post", "identify", *KINDS])
async def test_a_redirection_is_an_error_that_names_both_ends(how: str) -> None:
    for status in (300, 301, 302, 303, 307, 308):
        async with (
            answering([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]) as (target, seen),
            answering(redirection(status, f"Location: {target}/x\r\n")) as (url, _),
        ):
            with pytest.raises(ServerError, match=rf"{url}.* {status}, .*{target}/x"):
                await ask(url, how)
            assert not seen


async def test_no_other_redirection_is_followed_either() -> None:
    for location in (*(f"Location: {to}\r\n" for to in ("/elsewhere", "ftp://a/b", "")), ""):
        async with answering(redirection(302, location)) as (url, seen):
            with pytest.raises(RouteError, match="a redirection to") as caught:
                await ask(url, "get")
            assert len(seen) == 1 and caught.value.is_refusal


async def test_a_registry_that_points_elsewhere_gets_no_registration(capsys) -> None:
    for status in (301, 302, 303, 307, 308):
        async with (
            answering([b"HTTP/1.1 204 No Content\r\n\r\n"]) as (target, seen),
            answering(redirection(status, f"Location: {target}\r\n")) as (url, _),
        ):
            await asyncio.to_thread(Registrar(url, ONE, "secret").beat)
            said = capsys.readouterr().err
            assert f"cannot register at {url}" in said
            assert f"a redirection to '{target}', which is not followed" in said
            assert not seen


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SLOW = {
    "no answer": [b""],
    "headers": [b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n"] * 1000],
    "body": [OK + b"Content-Length: 100000\r\n\r\n", *[b"x"] * 1000],
    "half a body": [OK + b"Content-Length: 10\r\n\r\n12345"],
    "chunks": [OK + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 1000],
    "no length": [OK + b"Connection: close\r\n\r\n", *[b"x"] * 1000],
}


@pytest.mark.parametrize("name", SLOW)
async def test_an_answer_that_trickles_ends_the_request(name, monkeypatch, capsys) -> None:
    monkeypatch.setattr(connections, "_BODY_GRACE_SECONDS", SOON)
    monkeypatch.setattr(serve, "_REQUEST_SECONDS", SOON)
    has_begun = name not in ("no answer", "headers")
    async with answering(SLOW[name], 0.05) as (url, _):
        client = connection(url, SECONDS if has_begun else SOON)
        how = "was answered too slowly: " if has_begun else "was not answered within 0.3 s"
        with pytest.raises(RouteError, match=how):
            await client.get("/health")
        await client.close()
        if name != "no length":
            await asyncio.to_thread(Registrar(url, ONE, "secret").beat)
            assert "cannot register" in capsys.readouterr().err


async def test_an_answer_that_is_long_and_fast_enough_or_begins_late_arrives(monkeypatch) -> None:
    monkeypatch.setattr(connections, "_BODY_GRACE_SECONDS", SOON)
    parts = [OK + b"Content-Length: 100002\r\n\r\n", b'"' + b"x" * 50_000, b"x" * 50_000, b'"']
    async with answering(parts, SOON / 2) as (url, _):
        client = connection(url)
        assert (await client.get("/health")).body == "x" * 100_000
        await client.close()
    monkeypatch.setattr(connections, "_BODY_GRACE_SECONDS", SOON / 2)
    async with answering([OK + b"Content-Length: 2\r\n\r\n", b"{}"], SOON) as (url, _):
        await ask(url, "get")


def test_a_request_that_came_too_slowly_or_too_early_is_no_wrong_one() -> None:
    found = [RouteError("", status).is_refusal for status in (400, 404, 408, 429)]
    assert found == [True, True, False, False]
