# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ratings of texts, and the load of servers, in right and wrong answers of each kind."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.inference.client import PromptRating, ServerError, ServerLoad
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.inference.sglang import answers as sglang
from torchtitan.grpo.inference.sglang.answers import parse_loads
from torchtitan.grpo.inference.vllm import answers as vllm
from torchtitan.grpo.inference.vllm.answers import parse_metrics
from torchtitan.grpo.types import TopTokens

Place = list[tuple[int, Any]]
"""Id and logprob of the most likely tokens in the place of a token, the most likely one first."""

TOKENS = [5, 6, 7]


def sglang_answer(logprobs: list[Any], tops: list[Place], token_ids: list[int]) -> dict[str, Any]:
    tokens = zip(logprobs, token_ids, strict=False)
    meta: dict[str, Any] = {"input_token_logprobs": [[value, t, None] for value, t in tokens]}
    if tops:
        places = [[[value, token, None] for token, value in place] for place in tops]
        meta["input_top_logprobs"] = [None, *places]
    return {"meta_info": meta}


def vllm_answer(logprobs: list[Any], tops: list[Place], token_ids: list[int]) -> dict[str, Any]:
    """As vLLM writes it: the token itself first, unless it is one of the most likely ones."""
    places: list[Any] = [None]
    tokens = zip(logprobs[1:], token_ids[1:], strict=False)
    for i, (logprob, token) in enumerate(tokens):
        place = {str(token): {"logprob": logprob, "rank": 90, "decoded_token": None}}
        for rank, (other, value) in enumerate(tops[i] if tops else (), start=1):
            place[str(other)] = {"logprob": value, "rank": rank, "decoded_token": None}
        places.append(place)
    return {"prompt_logprobs": places}


Parse = Callable[[str, list[int], int, int, Any], PromptRating]
Answer = Callable[[list[Any], list[Place], list[int]], dict[str, Any]]
KINDS: dict[str, tuple[Parse, Answer]] = {
    "sglang": (sglang.parse_rating, sglang_answer),
    "vllm": (vllm.parse_rating, vllm_answer),
}


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_are_of_all_tokens_but_the_first(kind: str) -> None:
    parse, answer = KINDS[kind]

    def answered(logprobs: list[Any]) -> dict[str, Any]:
        return answer(logprobs, [], TOKENS)

    assert parse("url", TOKENS, 1, 0, answered([None, -1.0, -2.0])) == PromptRating([-1.0, -2.0])
    for low in (-104.0, -500.0, -9998.5, 1e-4):  # what was not sampled may be as unlikely as it is
        rating = parse("url", TOKENS, 1, 0, answered([None, -1.0, low]))
        assert rating == PromptRating([-1.0, low])
    for wrong in (None, math.nan, 0.5, "-1", -(10**400), -9999.0):
        with pytest.raises(ServerError, match="prompt logprobs must be finite"):
            parse("url", TOKENS, 1, 0, answered([None, -1.0, wrong]))
    for wrong in (answered([None, -1.0]), {}, None):
        with pytest.raises(ServerError, match=r"prompt_?logprobs|tokens sent|input_token"):
            parse("url", TOKENS, 1, 0, wrong)
    with pytest.raises(ServerError):
        parse("url", [5, 6, 8], 1, 0, answered([None, -1.0, -2.0]))


def test_sglang_may_call_the_last_token_of_the_vocabulary_0() -> None:
    entries = [[None, 5, None], [-1.0, 0, None], [-2.0, 7, None]]
    body = {"meta_info": {"input_token_logprobs": entries}}
    assert sglang.parse_rating("url", [5, 319, 7], 1, 0, body).logprobs == [-1.0, -2.0]


def test_sglang_is_asked_for_each_text_from_the_token_before_the_first_rated_one() -> None:
    body = sglang.rating_body([[5, 6, 7], [8, 9]], [2, 1], 4)
    assert body["input_ids"] == [[5, 6, 7], [8, 9]]
    assert body["logprob_start_len"] == [1, 0]
    assert body["top_logprobs_num"] == 4
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


# Token 6 is not among the most likely ones of its place, and 7 is.
TOPS: list[Place] = [[(9, -0.5), (0, -1.5)], [(3, -0.25), (7, -2.0)]]
LOGPROBS = [None, -6.0, -2.0]


def places(top: TopTokens) -> list[dict[int, float]]:
    pairs = zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
    return [dict(zip(*pair, strict=True)) for pair in pairs]


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_comes_with_the_most_likely_ones_in_its_place(kind: str) -> None:
    parse, answer = KINDS[kind]
    found = parse("url", TOKENS, 1, 2, answer(LOGPROBS, TOPS, TOKENS))
    assert found.logprobs == [-6.0, -2.0]
    assert found.top is not None
    assert (found.top.ids.dtype, found.top.logprobs.dtype) == (np.int32, np.float32)
    assert places(found.top) == [{9: -0.5, 0: -1.5}, {3: -0.25, 7: -2.0}]


def test_what_stands_before_the_first_rated_token_is_left_out() -> None:
    body = vllm_answer(LOGPROBS, TOPS, TOKENS)  # vLLM answers all places, whatever is needed
    found = [vllm.parse_rating("url", TOKENS, 2, 2, body)]
    body = sglang_answer(LOGPROBS[1:], TOPS[1:], TOKENS[1:])
    found.append(sglang.parse_rating("url", TOKENS, 2, 2, body))
    for rating in found:
        assert rating.logprobs == [-2.0]
        assert rating.top is not None
        assert places(rating.top) == [{3: -0.25, 7: -2.0}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ([(3, -0.25)], r"with the 2 most likely ones in its place, as was asked, got 1"),
        ([(3, -0.25), (2**31, -1.0)], r"must be integers in \[0, 2\*\*31\)"),
        ([(3, math.nan), (7, -1.0)], r"most likely tokens must be finite"),
        ([(3, 0.5), (7, -1.0)], r"not above 0"),
        ([(3, -0.5), (8, -9999.0)], r"above -9999 .*, got -9999.0 at token 3"),
    ],
)
def test_wrong_tokens_are_refused(kind: str, place: Place, message: str) -> None:
    parse, answer = KINDS[kind]
    with pytest.raises(ServerError, match=message):
        parse("url", TOKENS, 1, 2, answer(LOGPROBS, [TOPS[0], place], TOKENS))


@pytest.mark.parametrize(
    ("tops", "message"),
    [
        ([TOPS[0], [(3, -0.25), (3, -0.25)]], r"must be different ones, but the answer names"),
        ([TOPS[0], [(3, -0.25), (7, -1.0), (8, -2.0)]], r"as was asked, got 3"),
        ([TOPS[0]], r"must hold .*input_top_logprobs"),
        ([], r"must hold .*input_top_logprobs"),
    ],
)
def test_sglang_must_name_as_many_different_tokens_in_each_place(tops, message) -> None:
    with pytest.raises(ServerError, match=message):
        sglang.parse_rating("url", TOKENS, 1, 2, sglang_answer(LOGPROBS, tops, TOKENS))


def test_a_vllm_server_refuses_too_many_likely_tokens_by_naming_the_field() -> None:
    refused = {"error": {"message": "too many", "type": "BadRequestError", "code": 400}}
    named = {"error": refused["error"] | {"param": "prompt_logprobs"}}
    assert vllm.refuses_num_top(RouteError("answered 400", 400, named))
    assert not vllm.refuses_num_top(RouteError("answered 500", 500, named))
    for body in (refused, {"error": "too many"}, "too many", None):
        assert not vllm.refuses_num_top(RouteError("answered 400", 400, body))


METRICS = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="models/tiny"} 16.0
vllm:num_requests_waiting{engine="0",model_name="models/tiny"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="models/tiny",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="models/tiny"} 0.25
"""
SECOND_ENGINE = METRICS.replace('"0"', '"1"').replace("0.25", "1.5e-01")

RANK = {"dp_rank": 0, "num_running_reqs": 16, "num_waiting_reqs": 5, "token_usage": 0.25}


def test_the_load_is_read_from_vllms_metrics_and_sglangs_ranks() -> None:
    assert parse_metrics("url", METRICS) == ServerLoad(16, 5, 0.25)
    assert parse_metrics("url", METRICS + SECOND_ENGINE) == ServerLoad(32, 10, 0.25)
    assert parse_loads("url", {"loads": [RANK]}) == ServerLoad(16, 5, 0.25)
    second = RANK | {"dp_rank": 1, "token_usage": 0.5}
    assert parse_loads("url", {"loads": [RANK, second]}) == ServerLoad(32, 10, 0.5)


@pytest.mark.parametrize(
    ("parse", "body", "message"),
    [
        (parse_metrics, METRICS.replace("requests_running", "other"), "must hold vllm:num"),
        (parse_metrics, "", "--disable-log-stats"),
        (parse_metrics, None, "must hold vllm:num_requests_running, vllm:num_requests_waiting"),
        (parse_metrics, METRICS.replace("0.25", "NaN"), r"must answer numbers in \[0, 1e"),
        (parse_metrics, METRICS.replace(" 5.0", " -1.0"), r"must answer numbers in \[0, 1e"),
        (parse_metrics, METRICS.replace(" 5.0", " many"), r"must answer numbers in \[0, 1e"),
        (parse_loads, {"loads": []}, r"must answer numbers in \[0, 1e"),
        (parse_loads, {"loads": [{"num_running_reqs": 1}]}, "loads with .*num_waiting_reqs"),
        (parse_loads, {"loads": ["busy"]}, "must hold loads with"),
        (parse_loads, {"loads": [RANK | {"token_usage": None}]}, r"numbers in \[0, 1e"),
        (parse_loads, "busy", "must hold loads with"),
    ],
)
def test_an_answer_without_a_load_is_refused(parse: Any, body: Any, message: str) -> None:
    with pytest.raises(ServerError, match=f"^url.*{message}"):
        parse("url", body)
