# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Who may do what with a server of each kind, and what others can find out about its keys.

The server is the one of `test_real_servers.py`, started with both keys.
"""

import http.client
import json
import re
from typing import Any

import pytest
from bare_trainer import KEYS, RunningServer, joined
from listening import beyond_loopback, listening, session_of

pytestmark = pytest.mark.slow

GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate", "embedded": "/generate"}
# What an intruder would ask for.
CONTROL = {
    "vllm": [
        ("/collective_rpc", {"method": "save_sharded_state", "kwargs": {"path": "/tmp/x"}}),
        ("/pause", {}),
        ("/update_weights", {"update_info": {"action": "abandon"}}),
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/update_weight_version", {"new_version": "evil"}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/tmp"}),
    ],
    "sglang": [
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weights_from_disk", {"model_path": "/tmp"}),
        ("/update_weight_version", {"new_version": "evil"}),
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "/tmp"}),
        ("/configure_logging", {"dump_requests_folder": "/tmp"}),
    ],
    "embedded": [
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weights_from_disk", {"model_path": "/tmp"}),
        ("/update_weight_version", {"new_version": "evil"}),
    ],
}
READS = {
    "vllm": ["/metrics", "/v1/models", "/version"],
    "sglang": ["/model_info", "/server_info", "/v1/loads", "/v1/models"],
    "embedded": ["/model_info", "/server_info", "/v1/loads", "/v1/models"],
}
_OPEN = ("/health", "/ready")


def ask(
    server: RunningServer, method: str, route: str, body: Any = None, key: str = "", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.launched.spec.port, timeout=240)
    sent = {"Content-Type": "application/json"} if body is not None else {}
    sent |= {"Authorization": f"Bearer {KEYS[key]}"} if key else {}
    content = body if body is None or isinstance(body, str) else json.dumps(body)
    try:
        connection.request(method, route, content, sent | headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def generate(server: RunningServer, key: str = "api_key", **headers: str) -> tuple[int, str]:
    body: dict[str, Any] = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    if server.kind == "vllm":
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
    return ask(server, "POST", GENERATE[server.kind], body, key, **headers)


def version(server: RunningServer) -> str:
    route, key = (
        ("/weight_info", "admin_key") if server.kind == "vllm" else ("/model_info", "api_key")
    )
    return json.loads(ask(server, "GET", route, key=key)[1])["weight_version"]


def test_each_key_suffices_for_its_own_routes_alone(server: RunningServer) -> None:
    before = version(server)
    for route, body in CONTROL[server.kind]:
        for key in ("", "api_key"):
            status, text = ask(server, "POST", route, body, key)
            assert status == 401, (route, key, text)
    assert version(server) == before
    assert generate(server)[0] == 200, "it is not paused"
    assert generate(server, key="")[0] == 401
    assert generate(server, key="", Authorization="Bearer \xff\xfe")[0] == 401
    for route in READS[server.kind]:
        assert ask(server, "GET", route, key="api_key")[0] == 200, route
        assert ask(server, "GET", route)[0] == 401, route
    assert ask(server, "GET", "/health")[0] == 200


def test_no_route_of_the_server_answers_without_a_key(server: RunningServer) -> None:
    """Also routes that a new release brings are closed, because those that are open are listed."""
    if server.kind == "embedded":
        paths = {
            r: ["post"] for r in ("/pause_generation", "/weights_checker", "/end_weight_update")
        }
    else:
        paths = json.loads(ask(server, "GET", "/openapi.json", key="admin_key")[1])["paths"]
        assert len(paths) > 40
    for path, methods in paths.items():
        if path in _OPEN:
            continue
        for method in methods:
            status, _ = ask(server, method.upper(), path.replace("{", "").replace("}", ""))
            assert status == 401, (method, path)


def test_a_foreign_page_cannot_use_the_server_even_with_a_key(server: RunningServer) -> None:
    assert generate(server, Host="evil.example")[0] == 403
    assert generate(server, Origin="http://evil.example")[0] == 403
    if server.kind != "embedded":  # which has no answer to such a request
        assert ask(server, "OPTIONS", "/pause", Origin="http://evil.example")[0] == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert generate(server, **{"Content-Type": kind})[0] == 415
    assert generate(server, **{"Content-Type": "application/json; charset=klingon"})[0] == 415


def test_bodies_that_no_parser_likes_leave_the_server_alive(server: RunningServer) -> None:
    deep = '{"sampling_params": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert 400 <= ask(server, "POST", GENERATE[server.kind], deep, "api_key")[0] < 500
    assert generate(server)[0] == 200


def test_keys_are_in_no_answer_no_log_and_no_command_line(server: RunningServer) -> None:
    launched = server.launched
    shown = {
        "log": launched.log_file.read_text(errors="replace"),
        "server_info": ask(server, "GET", "/server_info", key="api_key")[1],
    }
    processes = session_of(launched.process.pid)
    assert processes
    shown |= {f"process {p.pid}": " ".join(p.cmdline()) for p in processes}
    for name, text in shown.items():
        for key in KEYS.values():
            assert key not in text, name
    assert launched.log_file.stat().st_mode & 0o777 == 0o600


async def test_a_run_has_nothing_to_warn_of_and_all_its_sockets_are_on_loopback(
    server: RunningServer,
) -> None:
    async with joined(server) as (client, _):  # with weight groups, which listen as well
        assert (await client.describe(1.0)).warnings == ()
        found = listening(session_of(server.launched.process.pid))
        assert len(found) >= 1
        assert not beyond_loopback(found)


def test_servers_that_a_run_launches_have_keys_that_only_the_run_knows(make_run: Any) -> None:
    own = make_run(
        "--training.steps=1000", "--grpo.prompts_per_step=2", "--evaluation.num_prompts=2"
    )
    own.start()
    own.wait_for_step(1)
    (log,) = (own.folder / "servers").glob("*.log")
    port = int(re.search(r"(?:Serving|READY) .*http://\S+:(\d+)", log.read_text())[1])
    for route, body in (("/generate", {"input_ids": [1]}), ("/pause_generation", {})):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 401, route
        connection.close()
