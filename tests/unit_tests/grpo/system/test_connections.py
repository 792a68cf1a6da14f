# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Connections that send nothing, or slowly, or that are too many, keep no server from its work."""

import asyncio
import contextlib
import gzip
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from light import LIGHT

from torchtitan.grpo.system import connections
from torchtitan.grpo.system.connections import answering
from torchtitan.grpo.system.http_site import HttpSite, read_body

SECONDS = 60.0
SOON = 0.3
LATE = 600.0
HEAD = b"POST /echo HTTP/1.1\r\nHost: a\r\n"
HALF = b"GET /short HTTP/1.1\r\nHost: a\r\n"
SHORT, HELD = HALF + b"\r\n", b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n"
KEYED = b"GET /held HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\n\r\n"
BUSY = b"HTTP/1.1 503 "


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.close = writer.close

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def trickle(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the other end gives up
            for i in range(len(data)):
                await self.send(data[i : i + 1])
                await asyncio.sleep(0.02)

    async def answer(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            return await self._reader.readline()
        return b""

    async def is_ended(self) -> bool:
        with contextlib.suppress(ConnectionError):
            await self._reader.read()
        return True

    async def stays(self) -> bool:
        try:
            await asyncio.wait_for(self._reader.read(1), 0.1)
        except TimeoutError:
            return True
        return False


class Site:
    """An application behind the limits: it echoes bodies, and holds requests until it ends."""

    def __init__(self) -> None:
        self.port = 0
        self._release, self._held = asyncio.Event(), asyncio.Semaphore(0)
        self._opened: list[Connection] = []

    async def connect(self, data: bytes = b"", host: str = "127.0.0.1") -> Connection:
        pipes = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))
        self._opened.append(Connection(*pipes))
        await self._opened[-1].send(data)
        return self._opened[-1]

    async def hold(self, data: bytes, host: str = "127.0.0.1") -> Connection:
        made = await self.connect(data, host)
        await self._held.acquire()
        return made

    async def handle(self, request: web.Request) -> web.Response:
        with answering(has_key="Authorization" in request.headers):
            if request.path == "/echo":
                return web.Response(body=await read_body(request, 2**22))
            if request.path == "/held":
                self._held.release()
                await self._release.wait()
        return web.Response(text="short")

    def close(self) -> None:
        self._release.set()
        for connection in self._opened:
            connection.close()


@contextlib.asynccontextmanager
async def serving(max_connections: int = 10, header_seconds: float = LATE) -> AsyncIterator[Site]:
    site, app = Site(), web.Application()
    app.router.add_route("*", "/{path}", site.handle)
    served = HttpSite(app, shutdown_timeout=0.1, keepalive_timeout=LATE)
    _, site.port = await served.start("127.0.0.1", 0, max_connections, header_seconds)
    try:
        async with asyncio.timeout(SECONDS):
            yield site
    finally:
        site.close()
        await served.close()


@pytest.mark.parametrize("begin", [b"", HALF, b"\r\n" * 20 + HALF], ids=range(3))
async def test_headers_must_arrive_in_time(begin: bytes) -> None:
    async with serving(header_seconds=SOON) as site:
        assert await (await site.connect(begin)).is_ended()
        trickling = await site.connect(begin)
        await trickling.trickle(b"X-Long: " + 10_000 * b"x")
        assert await trickling.is_ended()
        kept = await site.connect(SHORT)
        assert b" 200 " in await kept.answer()
        await kept.send(HALF)
        assert await kept.is_ended()


async def test_a_request_may_be_answered_for_long_and_an_idle_connection_is_kept() -> None:
    async with serving(header_seconds=SOON) as site:
        held, kept = await site.hold(HELD), await site.connect(SHORT)
        assert b" 200 " in await kept.answer()
        await asyncio.sleep(2 * SOON)
        assert await held.stays()
        await kept.send(SHORT)


def body(*headers: bytes) -> bytes:
    return HEAD + b"".join(header + b"\r\n" for header in headers) + b"\r\n"


SLOW_BODIES = {
    "trickled": (body(b"Content-Length: 100000"), 100_000 * b"x"),
    "chunks": (body(b"Transfer-Encoding: chunked"), 10_000 * b"1\r\nx\r\n"),
    "inside a chunk": (body(b"Transfer-Encoding: chunked"), b"ffff\r\n" + 60_000 * b"x"),
    "compressed": (
        body(b"Content-Encoding: gzip", b"Content-Length: 100000"),
        gzip.compress(bytes(range(256)) * 1000, 0),
    ),
    "expected": (body(b"Expect: 100-continue", b"Content-Length: 10"), b""),
}


@pytest.mark.parametrize("name", SLOW_BODIES)
async def test_a_body_must_arrive_in_time_and_not_too_slowly(name, monkeypatch):
    monkeypatch.setattr(connections, "_BODY_GRACE_SECONDS", SOON)
    async with serving() as site:
        head, rest = SLOW_BODIES[name]
        slow = await site.connect(head)
        sending = asyncio.create_task(slow.trickle(rest))
        answer = await slow.answer()
        if b" 100 " in answer:
            await slow.answer()
            answer = await slow.answer()
        assert b" 408 " in answer
        sending.cancel()


async def test_a_body_that_is_fast_enough_may_take_longer_than_the_grace(monkeypatch):
    found = [connections.body_seconds(n) for n in (0, 4096, 40_960, 2**30)]
    assert found == [10.0, 11.0, 20.0, 60.0]
    monkeypatch.setattr(connections, "_BODY_GRACE_SECONDS", SOON)
    async with serving() as site:
        sending = await site.connect(body(b"Content-Length: 1000000"))
        for _ in range(10):
            await sending.send(100_000 * b"x")
            await asyncio.sleep(2 * SOON / 10)
        assert b" 200 " in await sending.answer()
        too_long = await site.connect(body(b"Content-Length: 5000000"))
        writing = asyncio.create_task(too_long.send(5_000_000 * b"x"))
        assert b" 413 " in await too_long.answer()
        writing.cancel()


IDLE = {"silent": b"", "half": HALF, "kept": SHORT}


@pytest.mark.parametrize(
    ("state", "newcomer"), [("silent", "127.0.0.1"), ("half", "127.0.0.2"), ("kept", "127.0.0.2")]
)
async def test_idle_connections_shut_nobody_out(state: str, newcomer: str) -> None:
    async with serving(max_connections=3) as site:
        idle = [await site.connect(IDLE[state]) for _ in range(3)]
        if state == "kept":
            assert all([b" 200 " in await connection.answer() for connection in idle])
        for oldest in idle[:2]:
            assert b" 200 " in await (await site.connect(SHORT, host=newcomer)).answer()
            assert await oldest.is_ended()


async def test_requests_of_one_host_do_not_shut_out_another_one() -> None:
    async with serving(max_connections=4) as site:
        held = [await site.hold(HELD) for _ in range(4)]
        for _ in range(2):
            await site.hold(HELD, host="127.0.0.2")
        assert all([await connection.is_ended() for connection in held[:2]])
        assert all([await connection.stays() for connection in held[2:]])
        # Both have two now, so that neither takes one of the other.
        assert (await (await site.connect(SHORT)).answer()).startswith(BUSY)
        assert (await (await site.connect(SHORT, host="127.0.0.2")).answer()).startswith(BUSY)


async def test_who_has_a_key_is_not_shut_out_by_those_without_on_the_same_host() -> None:
    async with serving(max_connections=4) as site:
        keyed = [await site.hold(KEYED) for _ in range(2)]
        for part in (b"", HALF, SHORT) * 3:
            await site.connect(part)
        assert all([await connection.stays() for connection in keyed])
        await site.hold(KEYED)
        await site.hold(KEYED)
        refused = [await site.connect(part, host="127.0.0.2") for part in (SHORT, KEYED)]
        assert all([(await one.answer()).startswith(BUSY) for one in refused])
        assert all([await connection.stays() for connection in keyed])


async def test_an_idle_connection_with_a_key_goes_last() -> None:
    async with serving(max_connections=2) as site:
        keyed = await site.connect(KEYED.replace(b"/held", b"/short"))
        assert b" 200 " in await keyed.answer()
        silent = await site.connect()
        await site.hold(HELD)
        assert await silent.is_ended()
        await keyed.send(SHORT)
        assert b"\r\n" in await keyed.answer()
        await site.hold(HELD, host="127.0.0.2")
        assert await keyed.is_ended()


@pytest.mark.parametrize(
    ("soft", "hard", "left"),
    [
        (64, 64, None),
        (256, 256, None),
        (64, 1023, None),
        (64, 1024, 1024),
        (256, 9999, 4096),
        (6000, 9999, 6000),
    ],
)
def test_a_run_raises_the_limit_of_open_files_or_is_refused(soft, hard, left) -> None:
    code = LIGHT + (
        "import resource, sys;"
        "from torchtitan.grpo.system.process_tuning import require_open_files;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])));"
        "require_open_files();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    command = [sys.executable, "-c", code, str(soft), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True)
    if left is None:
        assert "must be allowed to open 1024 files at once" in done.stderr
        assert f"got {hard}, the hard limit (ulimit -Hn)" in done.stderr
        assert "ulimit -n " not in done.stderr, "which could not raise it"
    else:
        assert done.stdout == f"{left}\n", done.stderr


def test_the_limit_of_open_files_is_raised_or_bounds_the_connections() -> None:
    code = (
        f"import resource, runpy, sys; module = runpy.run_path({connections.__file__!r});"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, int(sys.argv[1])));"
        "fitting = module['raise_descriptor_limit'](1000);"
        "print(fitting, *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code, str(hard)], capture_output=True, text=True, check=True
        ).stdout.split()
        for hard in (2000, 600)
    ]
    assert found == [["1000", "1256", "2000"], ["344", "600", "600"]]


MALFORMED = {
    "blank before the colon": b"Authorization : Bearer SECRET\r\n",
    "no colon": b"Bearer SECRET\r\n",
    "null": b"Authorization: Bearer SECRET\0\r\n",
    "line break": b"Authorization: Bearer\rSECRET\r\n",
    "long value": b"Authorization: Bearer " + b"SECRET" * 2000 + b"\r\n",
    "long name": b"SECRET" * 2000 + b": a\r\n",
    "length": b"Content-Length: SECRET\r\n",
    "two lengths": b"Content-Length: 1\r\nContent-Length: SECRET\r\n",
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_requests_neither_show_keys_nor_fill_logs(
    caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level("INFO")
    site = HttpSite(web.Application())
    address = await site.start("127.0.0.1", 0, 100)
    try:
        for _ in range(100):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n" + MALFORMED[kind] + b"\r\n")
            async with asyncio.timeout(SECONDS):
                assert b" 400 " in (await reader.read()).partition(b"\r\n")[0]
            writer.close()
    finally:
        await site.close()
    assert not any(text in caplog.text for text in ("SECRET", "Traceback", "Authorization"))
    assert len(caplog.records) <= 8
