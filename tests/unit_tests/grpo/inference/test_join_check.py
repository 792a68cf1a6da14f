# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A server that a run cannot use is found when it joins, with what to start in its place.

The server is a real embedded one. What vLLM answers without its options was recorded from vLLM 0.32.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from forked import ForkServer
from server_kinds import held_port
from stub_clients import StubClient, serving

from torchtitan.grpo.inference.client import ServerFacts
from torchtitan.grpo.inference.http import HttpConnection
from torchtitan.grpo.inference.join_check import (
    ServerNeeds,
    WrongServer,
    check_server,
    model_problems,
    release_warnings,
    serve_command,
)
from torchtitan.grpo.inference.kinds import ServerSpec, make_client
from torchtitan.grpo.inference.vllm.answers import NO_GUARD, examine
from torchtitan.grpo.inference.waiting import wait_until_up

LENGTH = 128
KEY = "right-key"


@pytest.fixture(scope="module")
def model(repository: Path) -> str:
    return str(repository / "assets/reverse_digits/model")


@pytest.fixture(scope="module")
def needs(model: str) -> ServerNeeds:
    return ServerNeeds("embedded", model, LENGTH, "training.seq_len = 128", temperature=1.0)


@pytest.fixture(scope="module")
def url(model: str, fork_server: ForkServer, tmp_path_factory) -> Iterator[str]:
    """A real embedded server that takes sequences of 128 tokens, and one key."""
    port = held_port()
    spec = ServerSpec("embedded", model, port, "cpu", "float32", LENGTH, 8, api_key=KEY)
    server = fork_server.start_server(spec, tmp_path_factory.mktemp("server") / "server.log")
    yield server.url
    server.stop()


async def check(url: str, needs: ServerNeeds, key: str = KEY) -> tuple[list[str], str]:
    """Returns warnings, and the refusal."""
    up = make_client("embedded", url, api_key=KEY)
    client = make_client(needs.kind, url, api_key=key)
    warnings: list[str] = []

    async def check_one(client) -> None:
        warnings.extend((await check_server(client, needs))[1])

    try:
        await wait_until_up([up], [], 120)
        await wait_until_up([client], [], 120, check=check_one)
    except WrongServer as error:
        return warnings, str(error)
    finally:
        await up.close()
        await client.close()
    return warnings, ""


async def test_a_suitable_server_joins(url: str, needs: ServerNeeds) -> None:
    assert await check(url, needs) == ([], "")


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_server_of_another_kind_is_named(url: str, needs: ServerNeeds, kind) -> None:
    _, refusal = await check(url, replace(needs, kind=kind))
    assert "but the embedded server answers there" in refusal
    assert 'inference.kind = "embedded"' in refusal
    port = url.rpartition(":")[2]
    assert f"bash scripts/serve_{kind}.sh {needs.model_path} --port {port}" in refusal


async def test_a_server_that_takes_too_short_sequences_or_another_key_is_refused(
    url, needs
) -> None:
    _, refusal = await check(url, replace(needs, num_tokens=LENGTH + 1))
    assert "at most 128 tokens together, but this run needs 129" in refusal
    assert "--max-model-len 129" in refusal
    assert "rollout.max_new_tokens" in refusal
    _, refusal = await check(url, needs, key="wrong-key")
    assert "inference.api_key" in refusal
    assert "wrong-key" not in refusal


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("vocab_size", 256, "vocab_size of the model that it serves is 128"),
        ("architectures", ["LlamaForCausalLM"], "serves a Qwen3ForCausalLM"),
        ("num_hidden_layers", 28, "num_hidden_layers of the model that it serves is 4"),
    ],
)
async def test_a_server_of_another_model_is_refused(
    url: str, needs: ServerNeeds, name: str, value, shown: str, tmp_path: Path
) -> None:
    config = json.loads((Path(needs.model_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    _, refusal = await check(url, replace(needs, model_path=str(tmp_path)))
    assert shown in refusal


def test_a_server_on_another_machine_is_compared_by_what_it_tells(needs: ServerNeeds) -> None:
    facts = ServerFacts(
        "SGLang 0.5.23", model_path="/elsewhere", architecture="Qwen3ForCausalLM", vocab_size=151936
    )
    (problem,) = model_problems(facts, needs)
    assert "vocab_size of the model that it serves is 151936" in problem


def test_an_unknown_release_is_a_warning_and_a_known_one_is_not() -> None:
    known = ServerFacts("vLLM 0.33.1", release="0.33.1")
    for release in ("0.32.0", "0.33.1"):
        assert release_warnings("http://h:1", replace(known, release=release), "vllm") == []
    (warning,) = release_warnings("http://h:1", replace(known, release="0.41.0"), "vllm")
    assert "tested with 0.32" in warning


def test_a_server_for_other_hosts_listens_to_them(model: str) -> None:
    command = serve_command("vllm", "http://10.0.0.7:8000", model)
    assert command == f"bash scripts/serve_vllm.sh {model} --host 10.0.0.7 --port 8000"


@pytest.mark.parametrize(
    ("is_open", "key", "expected"), [(True, KEY, [NO_GUARD]), (False, KEY, []), (True, None, [])]
)
async def test_a_vllm_that_is_open_although_the_run_has_keys_is_a_warning(is_open, key, expected):
    async def weight_info(request: web.Request) -> web.Response:
        is_allowed = is_open or request.headers.get("Authorization") == f"Bearer {KEY}"
        return web.json_response({"weight_version": "1"}, status=200 if is_allowed else 401)

    async with serving(weight_info) as url:
        http = HttpConnection(url, api_key=key, admin_key=key, timeout_seconds=60)
        found = await examine(http)
        await http.close()
    assert found.warnings == expected


def vllm_without_options(missing: set[str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Answers as vLLM 0.32 does if some of its options are missing."""

    async def answer(request: web.Request) -> web.Response:
        path = request.path
        if path == "/version":
            return web.json_response({"version": "0.32.0"})
        if path == "/v1/models":
            card = {"id": "m", "owned_by": "vllm", "root": "/elsewhere", "max_model_len": 512}
            return web.json_response({"object": "list", "data": [card]})
        if path == "/health":
            return web.Response()
        if path == "/inference/v1/generate":
            if "--enable-scale-out" in missing:
                return refusal("Scale-out endpoints are disabled.", 403)
            return refusal(
                "in logit_bias contain out-of-vocab token ids. Vocabulary size: 128", 400
            )
        if path == "/weight_info" and "VLLM_SERVER_DEV_MODE" not in missing:
            return web.json_response({"weight_version": "default"})
        if path == "/init_weight_transfer_engine":
            return refusal("Weight transfer not configured.", 500)
        return web.json_response({"detail": "Not Found"}, status=404)

    return answer


def refusal(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@pytest.mark.parametrize(("kind", "software", "option"), [
    ("vllm", "vLLM 0.32.0", "--enable-sleep-mode"),
    ("sglang", "SGLang 0.5.23", "--enable-memory-saver"),
])  # fmt: skip
@pytest.mark.parametrize(("is_lent", "frees", "num_warnings"), [
    (True, "nothing", 1), (True, "memory", 0), (False, "nothing", 0),
])  # fmt: skip
async def test_a_lent_server_that_frees_nothing_is_named(
    needs, is_lent, frees, num_warnings, kind, software, option
) -> None:
    class Described(StubClient):
        url = "http://a"

        async def describe(self, temperature: float) -> ServerFacts:
            return ServerFacts(software, release=software.split()[1], sleep_frees=frees)

        async def num_workers(self) -> int:
            return 1

        async def resume(self) -> None: ...

    needs = replace(needs, kind=kind, is_lent=is_lent)
    _, warnings = await check_server(Described(), needs)
    assert len(warnings) == num_warnings
    for warning in warnings:
        assert f"http://a runs {software}, which keeps its weights and its KV cache" in warning
        assert option in warning


@pytest.mark.parametrize(
    "missing",
    [
        {"VLLM_SERVER_DEV_MODE", "--enable-scale-out"},
        {"--weight-transfer-config"},
        {"--enable-scale-out", "--weight-transfer-config"},
    ],
)
async def test_all_options_that_a_vllm_server_lacks_are_named_at_once(needs, missing) -> None:
    async with serving(vllm_without_options(missing)) as url:
        client = make_client("vllm", url)
        with pytest.raises(WrongServer) as caught:
            await check_server(client, replace(needs, kind="vllm"))
        await client.close()
    for option in (*missing, "bash scripts/serve_vllm.sh"):
        assert option in str(caught.value)
