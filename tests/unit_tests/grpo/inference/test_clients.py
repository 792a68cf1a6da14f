# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests how the clients parse answers of servers, and which requests they send.

The bodies below were recorded from SGLang 0.5.23 and vLLM 0.32.0.
"""

import asyncio
import copy
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from stub_clients import serving

from torchtitan.grpo.inference.answers import UNPUSHED_VERSION, version_segments
from torchtitan.grpo.inference.client import LogprobsError, ServerError
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.sglang import answers as sglang
from torchtitan.grpo.inference.vllm import answers as vllm
from torchtitan.grpo.types import GenerateRequest, VersionSegment

REQUEST = GenerateRequest("r-1", [5, 6, 7], 4, temperature=0.8, stop_token_ids=(9,))

SGLANG_ANSWER: dict[str, Any] = {
    "text": "w12 w13 w9",
    "output_ids": [12, 13, 9],
    "meta_info": {
        "id": "3:r-1", "finish_reason": {"type": "stop", "matched": 9}, "prompt_tokens": 3,
        "completion_tokens": 3, "cached_tokens": 0, "weight_version": "4",
        "weight_versions": [
            {"version": "3", "start": 0, "end": 2},
            {"version": "updating", "start": 2, "end": 2},
            {"version": "4", "start": 2, "end": 3},
        ],
        "output_token_logprobs": [[-0.5, 12, None], [-1.5, 13, None], [-2.0, 9, None]],
    },
}  # fmt: skip
_CONTENT = [
    {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
    for token, logprob in ((12, -0.5), (13, -1.5), (9, -2.0))
]
VLLM_ANSWER: dict[str, Any] = {
    "request_id": "generate-tokens-r-1",
    "choices": [{
        "index": 0, "finish_reason": "stop", "stop_reason": 9, "token_ids": [12, 13, 9],
        "weight_versions": [
            {"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3},
        ],
        "logprobs": {"content": _CONTENT},
    }],
    "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
}  # fmt: skip

GENERATE_ROUTES = dict.fromkeys(("embedded", "sglang"), "/generate")
GENERATE_ROUTES["vllm"] = "/inference/v1/generate"
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
LOGPROBS = {"sglang": [*META, "output_token_logprobs"], "vllm": CONTENT}
BEYOND_THE_END = {"version": "4", "start": 5, "end": 9}
UNEQUAL = "a token id and a logprob for each"

WRONG: list[tuple[str, list[Any], Any, str]] = [
    ("sglang", ["output_ids"], [12, 13], UNEQUAL),
    ("sglang", [*META, "completion_tokens"], 4, UNEQUAL),
    ("sglang", LOGPROBS["sglang"], [[-1.0, 12, None]], UNEQUAL),
    ("sglang", [*LOGPROBS["sglang"], 0, 1], 99, "do not belong to the sampled"),
    ("sglang", LOGPROBS["sglang"], 7, "must hold output_ids"),
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
    ("vllm", [*CHOICE, "token_ids"], [12, 13], UNEQUAL),
    ("vllm", ["usage", "completion_tokens"], 2, UNEQUAL),
    ("vllm", [*CONTENT, 1, "token_id"], 14, "do not belong to the sampled"),
    ("vllm", [*CHOICE, "finish_reason"], "repetition", "finish reason"),
    ("vllm", [*CHOICE, "weight_versions"], None, "weight_versions"),
    ("vllm", [*CHOICE, "weight_versions", 1, "version"], "updating", "broke off half-way"),
    ("vllm", ["choices"], [], "one choice"),
]


@pytest.mark.parametrize(("kind", "path", "value", "message"), WRONG)
def test_a_wrong_answer_is_refused(kind: str, path: list[Any], value: Any, message: str) -> None:
    parse, answer = KINDS[kind]
    with pytest.raises(ServerError, match=message):
        parse("http://host:1/generate", REQUEST, change(answer, path, value))


@pytest.mark.parametrize("kind", KINDS)
def test_rare_logprobs_are_taken_and_those_that_no_sampled_token_can_have_are_refused(kind) -> None:
    parse, answer = KINDS[kind]
    path = [*LOGPROBS[kind], 1, 0 if kind == "sglang" else "logprob"]
    for value in (0, 5e-4, -1e-30, -87.3):
        found = parse("http://host:1/generate", REQUEST, change(answer, path, value))
        assert found.logprobs[1] == np.float32(value)
    said = "^http://host:1/generate: logprobs of sampled tokens must be finite"
    for value in (-87.4, -9999.0, -88, -(10**400), 0.01, math.nan, None, "-0.5"):
        with pytest.raises(LogprobsError, match=said) as refused:
            parse("http://host:1/generate", REQUEST, change(answer, path, value))
        assert f"got {value!r}"[:80] in str(refused.value)


@pytest.mark.parametrize("token", [-1, 2**31])
def test_token_ids_outside_int32_and_more_tokens_than_asked_for_are_refused(token: int) -> None:
    answer = change(SGLANG_ANSWER, ["output_ids", 0], token)
    answer = change(answer, [*META, "output_token_logprobs", 0], [-0.5, token, None])
    with pytest.raises(ServerError, match="int32"):
        sglang.parse_generation("url", REQUEST, answer)
    with pytest.raises(ServerError, match="1 to 2 tokens, got 3"):
        sglang.parse_generation("url", replace(REQUEST, max_new_tokens=2), SGLANG_ANSWER)


def test_spans_become_segments_of_versions() -> None:
    segments = version_segments([("default", 0, 2), ("0", 2, 3)], 3, "url")
    assert segments == (VersionSegment(UNPUSHED_VERSION, 0, 2), VersionSegment(0, 2, 3))
    assert UNPUSHED_VERSION < 0, "tokens from before the first push are older than any version"
    assert version_segments([("2", 0, 1), ("2", 1, 3)], 3, "url") == (VersionSegment(2, 0, 3),)
    answer = copy.deepcopy(SGLANG_ANSWER)
    del answer["meta_info"]["weight_versions"]  # by a server that has one version alone
    generation = sglang.parse_generation("url", REQUEST, answer)
    assert generation.segments == (VersionSegment(4, 0, 3),)


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


def test_fused_parameters_know_their_checkpoint_names() -> None:
    layer = "model.layers.0"
    fused = ("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight", "mlp.experts.w13_weight",
             "mlp.experts.w2_weight")  # fmt: skip
    held = {"model.embed_tokens.weight", *(f"{layer}.{name}" for name in fused)}
    names = ("self_attn.q_proj", "mlp.up_proj", "mlp.experts.7.up_proj", "mlp.experts.7.down_proj")
    known = [*(f"{layer}.{name}.weight" for name in names), "lm_head.weight"]  # tied
    assert sglang.unknown_names(known, held) == []
    wrong = ["model.layers.1.mlp.up_proj.weight", f"{layer}.self_attn.o_proj.weight"]
    assert sglang.unknown_names([*known, *wrong], held) == wrong


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all parts of an answer, without the whole answer."""
    steps: Any = value if isinstance(value, dict) else ()
    if isinstance(value, list):
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
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert 1 <= len(ids) == len(logprobs) <= REQUEST.max_new_tokens
    assert (ids >= 0).all() and np.isfinite(logprobs).all()
    ends = [0, *(segment.end for segment in generation.segments)]
    assert [segment.start for segment in generation.segments] == ends[:-1]
    assert ends[-1] == len(ids)


@asynccontextmanager
async def client_of(kind: Any, handler: Any, **options: Any) -> AsyncIterator[Any]:
    """A client of an HTTP server that answers every route by ``handler``."""
    async with serving(handler) as url:
        client = make_client(kind, url, **options)
        yield client
        await client.close()


async def test_an_error_names_url_route_status_and_body() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=503, text="loading weights")

    async with client_of("vllm", handler) as client:
        message = rf"{client.url}/pause\?mode=keep answered 503: loading"
        with pytest.raises(ServerError, match=message):
            await client.pause()
    client = make_client("sglang", "http://127.0.0.1:9")
    with pytest.raises(ServerError, match="Is the server up"):
        await client.health()
    await client.close()


REPLIES = {
    "deep": (b"[" * 200_000, r"must answer a JSON object, got \[\["),
    "no UTF-8": (b'{"text": "\xff"}', "must be answered in UTF-8"),
    "cut": (b'{"output_ids": [1', "must answer a JSON object, got {"),
    "empty": (b"", "must answer a JSON object, got null"),
    "long": (b" " * (2**20 + 10_000), "at most 1055744 bytes, and the answer is longer"),
}


@pytest.mark.parametrize(("kind", "route"), GENERATE_ROUTES.items())
async def test_a_reply_that_is_not_an_answer_is_refused_with_its_address(kind, route) -> None:
    body = b""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async with client_of(kind, handler) as client:
        for reply, message in REPLIES.values():
            body = reply
            with pytest.raises(ServerError, match=message) as caught:
                await client.generate(replace(REQUEST, temperature=1.0))
            assert client.url + route in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "abort_route", "expected"),
    [
        ("sglang", "/abort_request", {"rid": "3:r-1"}),
        ("vllm", "/abort_requests", {"request_ids": ["generate-tokens-r-1"]}),
    ],
)
async def test_a_cancelled_request_is_aborted_on_the_server(kind, abort_route, expected) -> None:
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

    async with client_of(kind, handler) as client:
        task = asyncio.create_task(client.generate(GenerateRequest("r-1", [1], 4)))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await aborted.get() == expected


def vllm_answer(request_id: str, logprob: float, token: int) -> dict[str, Any]:
    answer = change(VLLM_ANSWER, ["choices", 0, "token_ids"], [token])
    answer["request_id"] = f"generate-tokens-{request_id}"
    answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 1}
    answer["choices"][0] |= {
        "logprobs": {"content": [{"token_id": token, "logprob": logprob}]},
        "weight_versions": [{"version": "1", "start": 0, "end": 1}],
    }
    return answer


@pytest.mark.parametrize("mode", ["processed", "raw"])
async def test_vllm_with_logprobs_before_temperature_is_refused(mode: str) -> None:
    probes: list[list[int]] = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        request_id, allowed = body["request_id"], body["sampling_params"].get("allowed_token_ids")
        if allowed is None:
            return web.json_response(vllm_answer(request_id, -1.0, 7))
        probes.append(allowed)
        # Raw: this model is nearly sure of token 0, as a real one may be.
        certain = mode == "processed" or allowed == [0]
        return web.json_response(vllm_answer(request_id, -1e-5 if certain else -9.0, allowed[0]))

    async with client_of("vllm", handler) as client:
        assert (await client.generate(GenerateRequest("a", [1], 1))).token_ids.tolist() == [7]
        assert not probes  # at temperature 1 both are the same
        warm = [GenerateRequest(name, [1], 1, temperature=0.7) for name in "bcd"]
        if mode == "processed":
            await asyncio.gather(*(client.generate(request) for request in warm))
        else:
            with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
                await client.generate(warm[0])
    assert probes == [[0], [1]]


@pytest.mark.parametrize("kind", GENERATE_ROUTES)
async def test_a_completion_may_take_longer_than_a_control_request(kind: str) -> None:
    timed_out = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        await timed_out.wait()
        return web.json_response(VLLM_ANSWER if kind == "vllm" else SGLANG_ANSWER)

    options = {"control_timeout_seconds": 0.2, "request_timeout_seconds": 60.0}
    async with client_of(kind, handler, **options) as client:
        completion = asyncio.create_task(client.generate(replace(REQUEST, temperature=1.0)))
        with pytest.raises(ServerError, match=r"not answered within 0\.2 s"):
            await client.version()
        # The completion was sent first, so its control timeout would have passed as well.
        await asyncio.sleep(0.2)
        timed_out.set()
        assert (await completion).token_ids.tolist() == [12, 13, 9]
