# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests that nobody should send: each is answered at once, and the server goes on."""

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import ForkServer

from torchtitan.grpo.inference.local_servers import LaunchedServer, free_ports
from torchtitan.grpo.inference.server_spec import ServerSpec

SECONDS = 120.0
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(
    fork_server: ForkServer, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedServer]:
    model = str(repository / "assets/reverse_digits/model")
    spec = ServerSpec(
        "embedded", model, free_ports(1)[0], "cpu", "float32", 256, 64,
        extra_args=("--dist-timeout", "3"),
    )  # fmt: skip
    launched = fork_server.start_server(spec, tmp_path_factory.mktemp("server") / "log")
    try:
        deadline = time.monotonic() + SECONDS
        while not is_ready(launched):
            assert launched.process.poll() is None, launched.log_tail()
            assert time.monotonic() < deadline, launched.log_tail()
            time.sleep(0.1)
        yield launched
    finally:
        launched.stop()


def is_ready(server: LaunchedServer) -> bool:
    try:
        return call(server, "GET", "/ready", None, {})[0] == 200
    except OSError:
        return False


def call(
    server: LaunchedServer,
    method: str,
    route: str,
    body: Any,
    headers: dict[str, str],
    seconds: float = SECONDS,
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.spec.port, timeout=seconds)
    try:
        connection.request(method, route, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def post(server: LaunchedServer, route: str, body: Any, **headers: str) -> tuple[int, str]:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return call(server, "POST", route, content, JSON | headers)


def serves(server: LaunchedServer) -> bool:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
    return post(server, "/generate", body)[0] == 200


def test_too_many_prompts_are_refused_before_they_take_memory(server: LaunchedServer) -> None:
    assert serves(server)
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    body = '{"input_ids": [' + ",".join(["[1]"] * 100_000) + "]}"
    status, text = post(server, "/generate", body)
    assert status == 400 and "got 100000" in text
    assert process.memory_info().rss - before < 64 * 2**20
    assert serves(server)


def test_a_body_of_more_than_16_mb_is_refused(server: LaunchedServer) -> None:
    status, _ = post(server, "/generate", b"[" * (17 * 2**20))
    assert status == 413
    assert serves(server)


@pytest.mark.parametrize(
    ("body", "content_type", "status", "words"),
    [
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "application/json", 400, "fewer brackets"),
        ("{}", "application/json; charset=klingon", 415, "utf-8, got 'klingon'"),
        (b'{"rid": "\xff"}', "application/json", 400, "JSON in UTF-8"),
        ("{", "application/json", 400, "JSON in UTF-8"),
        ("[]", "application/json", 400, "Expected `object`, got `array`"),
    ],
)
def test_a_body_that_is_no_json_is_one_message_and_no_traceback(
    server: LaunchedServer, body: Any, content_type: str, status: int, words: str
) -> None:
    for route in ("/generate", "/abort_request"):
        answered, text = call(server, "POST", route, body, {"Content-Type": content_type})
        assert answered == status, text
        assert words in json.loads(text)["message"]
    assert "Traceback" not in server.log_file.read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"master_port": 70_000}, "master_port"),
        ({"master_port": -1}, "master_port"),
        ({"world_size": 2**40}, "world_size"),
        ({"master_address": "127.0.0.1"}, "was not joined within 3.0 s"),
        ({"backend": "mpi"}, "backend"),
    ],
)
def test_a_group_that_cannot_be_joined_leaves_its_name_free(
    server: LaunchedServer, change: dict[str, Any], words: str
) -> None:
    body = {
        "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
        "group_name": "wrong", "backend": "gloo",
    }  # fmt: skip
    for _ in range(2):
        status, text = post(server, "/init_weights_update_group", body | change)
        assert status == 400 and words in text
    assert json.loads(call(server, "GET", "/server_info", None, {})[1])["weight_groups"] == []
    assert "Traceback" not in server.log_file.read_text()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_what_a_foreign_page_can_make_a_browser_send_changes_nothing(
    server: LaunchedServer, headers: dict[str, str], status: int
) -> None:
    """The server has no keys, so a browser on its machine could reach its control routes."""
    for route in ("/pause_generation", "/update_weight_version"):
        answered, text = call(server, "POST", route, '{"new_version": "evil"}', JSON | headers)
        assert answered == status, text
    info = json.loads(call(server, "GET", "/server_info", None, {})[1])
    assert not info["is_paused"] and info["weight_version"] == "default"
    assert serves(server)
