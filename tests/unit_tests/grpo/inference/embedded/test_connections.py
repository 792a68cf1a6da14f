# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Connections that send nothing, or that are too many, do not keep the server from its work."""

import contextlib
import logging
import os
import resource
import select
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.grpo.inference.embedded.__main__ import RepeatLimit
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

SECONDS = 120.0
HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
WHOLE = HALF + b"\r\n"


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
