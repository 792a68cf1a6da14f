# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests how the clients parse answers of servers, and which requests they send.

The bodies below were recorded from SGLang 0.5.23 and vLLM 0.32.0.
"""

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.inference.answers import UNPUSHED_VERSION, version_segments
from torchtitan.grpo.inference.client import LogprobsError, ServerError
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.sglang import answers as sglang
from torchtitan.grpo.inference.sglang.client import release_number
from torchtitan.grpo.inference.vllm import answers as vllm
from torchtitan.grpo.types import GenerateRequest, VersionSegment
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

GROUP = WeightGroupInfo("127.0.0.1", 1, 1, 2, "group", "gloo", 5.0)
REQUEST = GenerateRequest("r-1", [5, 6, 7], 4, temperature=0.8, stop_token_ids=(9,))

SGLANG_ANSWER: dict[str, Any] = {
    "text": "w12 w13 w9",
    "output_ids": [12, 13, 9],
    "meta_info": {
        "id": "3:r-1",
        "finish_reason": {"type": "stop", "matched": 9},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "4",
        "weight_versions": [
            {"version": "3", "start": 0, "end": 2},
            {"version": "updating", "start": 2, "end": 2},
            {"version": "4", "start": 2, "end": 3},
        ],
        "output_token_logprobs": [[-0.5, 12, None], [-1.5, 13, None], [-2.0, 9, None]],
    },
}

VLLM_ANSWER: dict[str, Any] = {
    "request_id": "generate-tokens-r-1",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": 9,
            "token_ids": [12, 13, 9],
            "weight_versions": [
                {"version": "3", "start": 0, "end": 2},
                {"version": "4", "start": 2, "end": 3},
            ],
            "logprobs": {
                "content": [
                    {"token_id": 12, "logprob": -0.5, "rank": 1, "top_logprobs": []},
                    {"token_id": 13, "logprob": -1.5, "rank": 2, "top_logprobs": []},
                    {"token_id": 9, "logprob": -2.0, "rank": 1, "top_logprobs": []},
                ]
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
}

GENERATE_ROUTES = {
    "embedded": "/generate",
    "sglang": "/generate",
    "vllm": "/inference/v1/generate",
}

KINDS = {
    "sglang": (sglang.parse_generation, SGLANG_ANSWER),
    "vllm": (vllm.parse_generation, VLLM_ANSWER),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_becomes_a_token_exact_generation(kind: str) -> None:
    parse, answer = KINDS[kind]
    generation = parse("url", REQUEST, answer)
    assert generation.token_ids.dtype == np.int32
    assert generation.token_ids.tolist() == [12, 13, 9]
    assert generation.logprobs.dtype == np.float32
    assert generation.logprobs.tolist() == [-0.5, -1.5, -2.0]
    assert generation.finish_reason == "stop"
    assert generation.segments == (VersionSegment(3, 0, 2), VersionSegment(4, 2, 3))


def change(answer: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(answer)
    place: Any = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return changed


META = ["meta_info"]
CHOICE = ["choices", 0]
CONTENT = [*CHOICE, "logprobs", "content"]
BEYOND_THE_END = {"version": "4", "start": 5, "end": 9}


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("sglang", ["output_ids"], [12, 13], "a token id and a logprob for each"),
        ("sglang", [*META, "completion_tokens"], 4, "a token id and a logprob for each"),
        (
            "sglang",
            [*META, "output_token_logprobs"],
            [[-1.0, 12, None]],
            "a token id and a logprob",
        ),
        ("sglang", [*META, "output_token_logprobs", 0, 1], 99, "do not belong to the sampled"),
        ("sglang", [*META, "output_token_logprobs", 0], [None, 12, None], "finite"),
        ("sglang", [*META, "output_token_logprobs", 0], ["-0.5", 12, None], "finite"),
        ("sglang", [*META, "output_token_logprobs", 0], [-(10**400), 12, None], "finite"),
        ("sglang", [*META, "output_token_logprobs"], 7, "must hold output_ids"),
        ("sglang", ["output_ids"], [12, [13], 9], "int32"),
        ("sglang", [*META, "id"], "3:r-2", "under its own id, got '3:r-2'"),
        ("sglang", [*META, "prompt_tokens"], 2, "with 3 prompt tokens, but the answer states 2"),
        ("sglang", [*META, "finish_reason"], {"type": "error"}, "finish reason"),
        ("sglang", [*META, "finish_reason"], None, "must hold output_ids"),
        ("sglang", [*META, "weight_versions", 2, "end"], 2, "cover 3 tokens"),
        ("sglang", [*META, "weight_versions", 0, "start"], 1, "cover 3 tokens"),
        ("sglang", [*META, "weight_versions", 2, "version"], "updating", "broke off half-way"),
        ("sglang", [*META, "weight_versions", 2, "version"], "9" * 5000, "must be the number"),
        ("sglang", [*META, "weight_versions", 1], BEYOND_THE_END, "cover 3 tokens"),
        ("vllm", ["request_id"], "generate-tokens-r-2", "own id, got 'generate-tokens-r-2'"),
        ("vllm", ["usage", "prompt_tokens"], 4, "with 3 prompt tokens, but the answer states 4"),
        ("vllm", [*CONTENT, 1, "logprob"], math.nan, "finite"),
        ("vllm", [*CHOICE, "token_ids"], [12, 13], "a token id and a logprob for each"),
        ("vllm", ["usage", "completion_tokens"], 2, "a token id and a logprob for each"),
        ("vllm", [*CONTENT, 1, "token_id"], 14, "do not belong to the sampled"),
        ("vllm", [*CHOICE, "finish_reason"], "repetition", "finish reason"),
        ("vllm", [*CHOICE, "weight_versions"], None, "weight_versions"),
        ("vllm", [*CHOICE, "weight_versions", 1, "version"], "updating", "broke off half-way"),
        ("vllm", ["choices"], [], "one choice"),
    ],
)
def test_a_wrong_answer_is_refused(kind: str, path: list[Any], value: Any, message: str) -> None:
    parse, answer = KINDS[kind]
    with pytest.raises(ServerError, match=message):
        parse("http://host:1/generate", REQUEST, change(answer, path, value))


IMPOSSIBLE = [-87.4, -9999.0, -3.4e38, -88, -(2**70), 0.01, math.nan]


@pytest.mark.parametrize("value", IMPOSSIBLE)
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_logprobs_that_no_sampled_token_can_have_are_refused(kind: str, value: float) -> None:
    parse, answer = KINDS[kind]
    path = [*META, "output_token_logprobs", 1, 0] if kind == "sglang" else [*CONTENT, 1, "logprob"]
    with pytest.raises(LogprobsError) as refused:
        parse("http://host:1/generate", REQUEST, change(answer, path, value))
    message = str(refused.value)
    assert message.startswith("http://host:1/generate: logprobs of sampled tokens must be finite")
    assert f"got {value!r} at token 1." in message


@pytest.mark.parametrize("value", [0, 5e-4, -1e-30, -87.3])
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_logprobs_that_are_rare_are_taken(kind: str, value: float) -> None:
    parse, answer = KINDS[kind]
    path = [*META, "output_token_logprobs", 1, 0] if kind == "sglang" else [*CONTENT, 1, "logprob"]
    found = parse("http://host:1/generate", REQUEST, change(answer, path, value))
    assert found.logprobs[1] == np.float32(value)


@pytest.mark.parametrize("token", [-1, 2**31])
def test_token_ids_outside_int32_are_refused(token: int) -> None:
    answer = change(SGLANG_ANSWER, ["output_ids", 0], token)
    answer = change(answer, [*META, "output_token_logprobs", 0], [-0.5, token, None])
    with pytest.raises(ServerError, match="int32"):
        sglang.parse_generation("url", REQUEST, answer)
    with pytest.raises(ServerError, match="1 to 2 tokens, got 3"):
        sglang.parse_generation("url", replace(REQUEST, max_new_tokens=2), SGLANG_ANSWER)


def test_a_server_without_spans_has_one_segment_of_its_one_version() -> None:
    answer = copy.deepcopy(SGLANG_ANSWER)
    del answer["meta_info"]["weight_versions"]
    generation = sglang.parse_generation("url", REQUEST, answer)
    assert generation.segments == (VersionSegment(4, 0, 3),)


def test_spans_become_segments_of_versions() -> None:
    segments = version_segments([("default", 0, 2), ("0", 2, 3)], 3, "url")
    assert segments == (VersionSegment(UNPUSHED_VERSION, 0, 2), VersionSegment(0, 2, 3))
    assert UNPUSHED_VERSION < 0, "tokens from before the first push are older than any version"
    assert version_segments([("2", 0, 1), ("2", 1, 3)], 3, "url") == (VersionSegment(2, 0, 3),)


def test_bodies_state_everything_that_shapes_the_distribution() -> None:
    body = sglang.generate_body(REQUEST)
    assert body["input_ids"] == [5, 6, 7]
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [9],
        "ignore_eos": False,
    }
    body = vllm.generate_body(REQUEST)
    assert body["token_ids"] == [5, 6, 7]
    assert body["sampling_params"]["top_k"] == 0  # vLLM's way to say off
    assert body["sampling_params"]["repetition_penalty"] == 1.0


@pytest.mark.parametrize("client", [sglang, vllm])
@pytest.mark.parametrize(
    ("unknown", "excluded"),
    [((), None), ((98, 127), ["98", "127"]), (tuple(range(1025)), None)],  # vLLM takes 1,024
)
def test_ids_that_are_no_token_are_excluded_by_the_server(client, unknown, excluded):
    request = replace(REQUEST, unknown_ids=unknown)
    bias = client.generate_body(request)["sampling_params"].get("logit_bias")
    assert bias == (None if excluded is None else dict.fromkeys(excluded, -100.0))


def test_no_request_id_is_a_prefix_of_another_on_sglang() -> None:
    # SGLang aborts every request whose id begins with the one given.
    ids = ["1", "12", "1:2", "2:1", "12:1", "g-1", "g-11"]
    rids = [sglang.generate_body(GenerateRequest(i, [1], 1))["rid"] for i in ids]
    for one in rids:
        assert [other for other in rids if other.startswith(one)] == [one]


def test_release_numbers() -> None:
    found = [release_number(v) for v in ("0.5.23", "0.5.20.post1", "0.0.0.dev1+gabc", None)]
    assert found == [(0, 5, 23), (0, 5, 20), None, None]


def test_fused_parameters_know_their_checkpoint_names() -> None:
    layer = "model.layers.0"
    held = {
        f"{layer}.self_attn.qkv_proj.weight",
        f"{layer}.mlp.gate_up_proj.weight",
        f"{layer}.mlp.experts.w13_weight",
        f"{layer}.mlp.experts.w2_weight",
        "model.embed_tokens.weight",
    }
    known = [
        f"{layer}.self_attn.q_proj.weight",
        f"{layer}.mlp.up_proj.weight",
        f"{layer}.mlp.experts.7.up_proj.weight",
        f"{layer}.mlp.experts.7.down_proj.weight",
        "lm_head.weight",  # tied
    ]
    assert sglang.unknown_names(known, held) == []
    wrong = ["model.layers.1.mlp.up_proj.weight", f"{layer}.self_attn.o_proj.weight"]
    assert sglang.unknown_names([*known, *wrong], held) == wrong


@pytest.mark.parametrize(
    ("kind", "url", "message"),
    [("tgi", "http://h:1", "inference.kind"), ("vllm", "h:1", "inference.urls")],
)
def test_a_client_for_nonsense_is_refused(kind: Any, url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_client(kind, url)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all parts of an answer, without the whole answer."""
    steps: Any = ()
    if isinstance(value, dict):
        steps = value
    elif isinstance(value, list):
        steps = range(len(value))
    below = [place for step in steps for place in places(value[step], (*path, step))]
    return [path, *below] if path else below


WILD: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("9"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_whatever_stands_in_an_answer_it_is_exact_or_a_server_error(kind: str, data: Any) -> None:
    parse, answer = KINDS[kind]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(answer)))
        answer = change(answer, list(path), data.draw(WILD))
    try:
        generation = parse("url", REQUEST, answer)
    except ServerError:
        return
    ids, logprobs = generation.token_ids, generation.logprobs
    assert ids.dtype == np.int32
    assert logprobs.dtype == np.float32
    assert 1 <= len(ids) == len(logprobs) <= REQUEST.max_new_tokens
    assert (ids >= 0).all()
    assert np.isfinite(logprobs).all()
    ends = [0, *(segment.end for segment in generation.segments)]
    assert [segment.start for segment in generation.segments] == ends[:-1]
    assert ends[-1] == len(ids)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def with_client(
    kind: Any, handler: Handler, test: Callable[[Any], Awaitable[None]], **options: Any
) -> None:
    """Runs ``test`` with a client of an HTTP server that answers every route by ``handler``."""

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = make_client(kind, f"http://127.0.0.1:{runner.addresses[0][1]}/", **options)
        try:
            async with asyncio.timeout(60):
                await test(client)
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(run())


def test_each_route_is_given_its_own_key() -> None:
    seen: dict[str, str | None] = {}

    async def handler(request: web.Request) -> web.Response:
        seen[request.path] = request.headers.get("Authorization")
        return web.json_response(SGLANG_ANSWER if request.path == "/generate" else {})

    async def test(client: Any) -> None:
        await client.generate(REQUEST)
        await client.pause()

    with_client("sglang", handler, test, api_key="generation", admin_key="control")
    assert seen == {"/generate": "Bearer generation", "/pause_generation": "Bearer control"}


def test_an_error_names_url_route_status_and_body() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=503, text="loading weights")

    async def test(client: Any) -> None:
        message = rf"{client.url}/pause\?mode=keep answered 503: loading"
        with pytest.raises(ServerError, match=message):
            await client.pause()

    with_client("vllm", handler, test)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 200_000, r"must answer a JSON object, got \[\["),
        (b'{"text": "\xff"}', "must be answered in UTF-8"),
        (b'{"output_ids": [1', "must answer a JSON object, got {"),
        (b"", "must answer a JSON object, got null"),
        (b" " * (2**20 + 10_000), "at most 1055744 bytes, and the answer is longer"),
    ],
    ids=["deep", "no UTF-8", "cut", "empty", "long"],
)
@pytest.mark.parametrize(("kind", "route"), GENERATE_ROUTES.items())
def test_a_reply_that_is_not_an_answer_is_refused_with_its_address(
    kind: str, route: str, body: bytes, message: str
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async def test(client: Any) -> None:
        with pytest.raises(ServerError, match=message) as caught:
            await client.generate(replace(REQUEST, temperature=1.0))
        assert client.url + route in str(caught.value)

    with_client(kind, handler, test)


def test_a_server_that_is_not_there_is_a_server_error() -> None:
    async def test() -> None:
        client = make_client("sglang", "http://127.0.0.1:9")
        with pytest.raises(ServerError, match="Is the server up"):
            await client.health()
        await client.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("kind", "abort_route", "expected"),
    [
        ("sglang", "/abort_request", {"rid": "3:r-1"}),
        ("vllm", "/abort_requests", {"request_ids": ["generate-tokens-r-1"]}),
    ],
)
def test_a_cancelled_request_is_aborted_on_the_server(
    kind: str, abort_route: str, expected: dict[str, Any]
) -> None:
    started, aborted = asyncio.Event(), asyncio.Queue[Any]()
    may_answer = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        if request.path == GENERATE_ROUTES[kind]:
            started.set()
            await may_answer.wait()
        elif request.path == abort_route:
            aborted.put_nowait(await request.json())
            may_answer.set()
        return web.json_response({})

    async def test(client: Any) -> None:
        task = asyncio.create_task(client.generate(GenerateRequest("r-1", [1], 4)))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await aborted.get() == expected

    with_client(kind, handler, test)


def test_sglang_before_0_5_21_is_updated_without_a_session() -> None:
    routes: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        routes.append(request.path)
        if request.path in ("/weights_checker", "/update_weight_version"):
            return web.Response(status=404)
        return web.json_response({"version": "0.5.20", "weight_version": "3"})

    async def test(client: Any) -> None:
        await client.join_weight_group(GROUP)
        await client.begin_update()
        spec = BucketSpec(("a.weight",), ("float32",), ((2, 2),))
        await client.receive_bucket(spec, group_name="group", last=True, version=3)
        await client.commit_update(3)

    with_client("sglang", handler, test)
    assert "/update_weights_from_distributed" in routes
    assert not {"/begin_weight_update", "/end_weight_update"} & {*routes}


def test_unknown_names_are_refused_before_sglang_is_asked_to_receive() -> None:
    routes: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        routes.append(request.path)
        checksums = {"model.layers.0.self_attn.qkv_proj.weight": "abc"}
        return web.json_response({"success": True, "ranks": [{"checksums": checksums}]})

    async def test(client: Any) -> None:
        await client.join_weight_group(GROUP)
        spec = BucketSpec(("model.layers.9.self_attn.q_proj.weight",), ("float32",), ((2, 2),))
        with pytest.raises(ServerError, match=r"no parameters named .*layers\.9"):
            await client.receive_bucket(spec, group_name="group", last=True, version=3)

    with_client("sglang", handler, test)
    assert not {"/update_weights_from_distributed", "/update_weight_version"} & {*routes}


def vllm_answer(request_id: str, logprob: float, token: int) -> dict[str, Any]:
    entry = {"token_id": token, "logprob": logprob}
    choice = {
        "token_ids": [token],
        "finish_reason": "length",
        "logprobs": {"content": [entry]},
        "weight_versions": [{"version": "1", "start": 0, "end": 1}],
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    return {"request_id": f"generate-tokens-{request_id}", "choices": [choice], "usage": usage}


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_vllm_with_logprobs_before_temperature_is_refused(mode: str) -> None:
    probes: list[list[int]] = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        request_id, allowed = body["request_id"], body["sampling_params"].get("allowed_token_ids")
        if allowed is None:
            return web.json_response(vllm_answer(request_id, -1.0, 7))
        probes.append(allowed)
        # Raw: this model is nearly sure of token 0, as a real one may be.
        certain = mode == "processed" or allowed == [0]
        logprob = -1e-5 if certain else -9.0
        return web.json_response(vllm_answer(request_id, logprob, allowed[0]))

    async def test(client: Any) -> None:
        assert (await client.generate(GenerateRequest("a", [1], 1))).token_ids.tolist() == [7]
        assert not probes  # at temperature 1 both are the same
        warm = [GenerateRequest(name, [1], 1, temperature=0.7) for name in "bcd"]
        if mode == "processed":
            await asyncio.gather(*(client.generate(request) for request in warm))
        else:
            with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
                await client.generate(warm[0])

    with_client("vllm", handler, test)
    assert probes == [[0], [1]]


@pytest.mark.parametrize("kind", GENERATE_ROUTES)
def test_a_completion_may_take_longer_than_a_control_request(kind: str) -> None:
    """The server answers a completion only after a control request has timed out."""
    timed_out = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        await timed_out.wait()
        return web.json_response(VLLM_ANSWER if kind == "vllm" else SGLANG_ANSWER)

    async def test(client: Any) -> None:
        completion = asyncio.create_task(client.generate(replace(REQUEST, temperature=1.0)))
        with pytest.raises(ServerError, match=r"not answered within 0\.2 s"):
            await client.version()
        # The completion was sent first, so its control timeout would have passed as well.
        await asyncio.sleep(0.2)
        timed_out.set()
        assert (await completion).token_ids.tolist() == [12, 13, 9]

    with_client(kind, handler, test, control_timeout_seconds=0.2, request_timeout_seconds=60.0)
