# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Connections that send nothing, or that are too many, do not keep the server from its work."""

import asyncio
import contextlib
import logging
import os
import resource
import select
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from torchtitan.grpo.inference.embedded import connections
from torchtitan.grpo.inference.embedded.connections import ConnectionLimits
from torchtitan.grpo.inference.embedded.repeat_limit import RepeatLimit
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

SECONDS = 120.0
HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
WHOLE = HALF + b"\r\n"


class Silent(asyncio.Protocol):
    """Serves a connection: it says hello to a whole request, and keeps the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.seen = b""

    def data_received(self, data: bytes) -> None:
        self.seen += data
        if self.seen.endswith(b"\r\n\r\n"):
            self.transport.write(b"hello")


Connect = Callable[[bytes], Awaitable[asyncio.StreamReader]]


def serve(
    max_connections: int, header_seconds: float, test: Callable[[Connect], Awaitable[None]]
) -> None:
    async def run() -> None:
        limits = ConnectionLimits(Silent, max_connections, header_seconds)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(limits.make_protocol, "127.0.0.1", 0)
        writers: list[asyncio.StreamWriter] = []

        async def connect(data: bytes) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writers.append(writer)
            writer.write(data)
            return reader

        try:
            async with asyncio.timeout(SECONDS):
                await test(connect)
                for writer in writers:
                    writer.close()
                while limits.num_open or limits.without_headers:
                    await asyncio.sleep(0.01)
        finally:
            server.close()

    asyncio.run(run())


async def is_dropped(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_without_headers_is_closed_in_time() -> None:
    async def test(connect: Connect) -> None:
        readers = [await connect(data) for data in (b"", HALF, WHOLE[:-1])]
        assert all([await is_dropped(reader) for reader in readers])

    serve(10, 0.2, test)


def test_a_connection_with_headers_is_kept() -> None:
    async def test(connect: Connect) -> None:
        reader = await connect(WHOLE)
        assert await reader.readexactly(5) == b"hello"
        assert await is_dropped(await connect(HALF))  # by then its own time has passed, too
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)

    serve(10, 0.2, test)


def test_a_connection_that_sends_nothing_makes_room_for_one_that_does() -> None:
    async def test(connect: Connect) -> None:
        first, second = await connect(HALF), await connect(HALF)
        third = await connect(WHOLE)
        assert await third.readexactly(5) == b"hello"
        assert await is_dropped(first)
        fourth = await connect(WHOLE)
        assert await fourth.readexactly(5) == b"hello"
        assert await is_dropped(second)

    serve(2, 600.0, test)


def test_beyond_the_limit_a_connection_is_told_so() -> None:
    async def test(connect: Connect) -> None:
        held = [await connect(WHOLE) for _ in range(2)]
        for reader in held:
            assert await reader.readexactly(5) == b"hello"
        answer = await (await connect(WHOLE)).read()
        assert answer.startswith(b"HTTP/1.1 503 ") and answer.endswith(b"Too many connections.\n")

    serve(2, 600.0, test)


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


def test_a_line_that_comes_again_and_again_is_written_a_few_times(caplog) -> None:
    limit = RepeatLimit(max_lines=3, period_seconds=0.3)
    logger = logging.getLogger("repeated")
    caplog.handler.addFilter(limit)
    try:
        with caplog.at_level(logging.INFO, "repeated"):
            for i in range(10):
                logger.info("again %d", i)
            logger.info("another one")
            time.sleep(0.31)
            for i in (1, 2):
                logger.info("again later %d", i)
    finally:
        caplog.handler.removeFilter(limit)
    assert caplog.messages[:4] == ["again 0", "again 1", "again 2", "another one"]
    assert caplog.messages[4:] == ["again later 1", "again later 2"]


@pytest.fixture
def many_files() -> Iterator[None]:
    """Lets this process open the files that the test below needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_1100_half_open_connections_do_not_end_the_server(
    repository: Path, tmp_path: Path, many_files: None
) -> None:
    """The server is started with the usual limit of 1,024 open files."""
    log, port_file = tmp_path / "log", tmp_path / "port"
    server = start_child(
        ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "_", *LIGHT_PYTHON]
        + ["torchtitan.grpo.inference.embedded", "--device", "cpu", "--port", "0"]
        + ["--model-path", str(repository / "assets/reverse_digits/model")]
        + ["--port-file", str(port_file), "--header-timeout", "3"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        log_file=log,
    )
    held: list[socket.socket] = []
    try:
        deadline = time.monotonic() + SECONDS
        while not port_file.exists():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        port = int(port_file.read_text())
        for _ in range(1100):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=SECONDS))
            held[-1].sendall(HALF)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=SECONDS) as answer:
            assert answer.status == 200
        deadline = time.monotonic() + SECONDS
        while waiting := [s for s in held if not has_ended(s)]:
            assert time.monotonic() < deadline, f"{len(waiting)} connections are held"
            time.sleep(0.1)
        assert server.poll() is None
    finally:
        for connection in held:
            connection.close()
        stop_children([server])
    assert "Traceback" not in log.read_text()
    assert log.stat().st_size < 50_000


def has_ended(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(0):
        return False
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True
