# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests and connections that nobody should send: the server answers at once, and goes on."""

import contextlib
import http.client
import json
import logging
import resource
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from embedded_process import Server

from torchtitan.grpo.inference.embedded.__main__ import RepeatLimit
from torchtitan.grpo.system.child import stop_children

SECONDS = 120.0
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    made = Server(folder, model_path, "--dist-timeout", "1", "--header-timeout", "3")
    try:
        yield made.wait()
        assert "Traceback" not in made.log.read_text()
    finally:
        stop_children([made.process])


def call(
    server: Server, method: str, route: str, body: Any, headers: dict[str, str]
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request(method, route, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def post(server: Server, route: str, body: Any) -> tuple[int, str]:
    return call(server, "POST", route, body if isinstance(body, bytes) else json.dumps(body), JSON)


def info(server: Server) -> dict[str, Any]:
    return json.loads(call(server, "GET", "/server_info", None, {})[1])


def serves(server: Server) -> bool:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
    return post(server, "/generate", body)[0] == 200


def test_too_large_bodies_are_refused_before_they_take_memory(server: Server) -> None:
    assert serves(server)
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    status, text = post(server, "/generate", {"input_ids": [[1]] * 100_000})
    assert status == 400 and "got 100000" in text
    assert process.memory_info().rss - before < 64 * 2**20
    assert post(server, "/generate", b"[" * (17 * 2**20))[0] == 413
    assert serves(server)


@pytest.mark.parametrize(
    ("body", "charset", "status", "words"),
    [
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "", 400, "fewer brackets"),
        ("{}", "; charset=klingon", 415, "utf-8, got 'klingon'"),
        (b'{"rid": "\xff"}', "", 400, "JSON in UTF-8"),
        ("{", "", 400, "JSON in UTF-8"),
        ("[]", "", 400, "Expected `object`, got `array`"),
    ],
)
def test_a_body_that_is_no_json_is_one_message(
    server: Server, body: Any, charset: str, status: int, words: str
) -> None:
    headers = {"Content-Type": f"application/json{charset}"}
    for route in ("/generate", "/abort_request"):
        answered, text = call(server, "POST", route, body, headers)
        assert answered == status, text
        assert words in json.loads(text)["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"master_port": 70_000}, "master_port"),
        ({"master_port": -1}, "master_port"),
        ({"world_size": 2**40}, "world_size"),
        ({"master_address": "127.0.0.1"}, "was not joined within 1.0 s"),
        ({"backend": "mpi"}, "backend"),
    ],
)
def test_a_group_that_cannot_be_joined_leaves_its_name_free(
    server: Server, change: dict[str, Any], words: str
) -> None:
    body = {
        "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
        "group_name": "wrong", "backend": "gloo",
    }  # fmt: skip
    for _ in range(2):
        status, text = post(server, "/init_weights_update_group", body | change)
        assert status == 400 and words in text
    assert info(server)["weight_groups"] == []


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


def test_1100_half_open_connections_do_not_end_the_server(server: Server, many_files: None) -> None:
    """The server was started with the usual limit of 1,024 open files."""
    size = server.log.stat().st_size
    with contextlib.ExitStack() as stack:
        held: list[socket.socket] = []
        for _ in range(1100):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
            held.append(stack.enter_context(connection))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert call(server, "GET", "/health", None, {})[0] == 200
        deadline = time.monotonic() + SECONDS
        while waiting := [one for one in held if not has_ended(one)]:
            assert time.monotonic() < deadline, f"{len(waiting)} connections are held"
            time.sleep(0.1)
    assert serves(server)
    assert server.log.stat().st_size - size < 50_000


def has_ended(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(0):
        return False
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True
