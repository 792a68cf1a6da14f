# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests and answers of vLLM's routes for generation and for its load."""

import re
from typing import Any

from torchtitan.grpo.inference.answers import (
    as_object,
    checked_generation,
    checked_load,
    checked_rating,
    logit_bias,
    reading,
    to_number,
)
from torchtitan.grpo.inference.client import LogprobsError, PromptRating, ServerError, ServerLoad
from torchtitan.grpo.inference.http import RouteError, excerpt
from torchtitan.grpo.types import GenerateRequest, Generation

GENERATE_ROUTE = "/inference/v1/generate"

REQUEST_ID_PREFIX = "generate-tokens-"
"""The server prepends this to the id of a request, and aborts by the whole id."""
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USE = "vllm:kv_cache_usage_perc"
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def generate_body(request: GenerateRequest) -> dict[str, Any]:
    """Also sets what the model's ``generation_config.json`` would otherwise fill in."""
    return {
        "request_id": request.request_id,
        "token_ids": request.prompt_ids,
        "stream": False,
        "sampling_params": {
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": max(request.top_k, 0),
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(request.stop_token_ids),
            "ignore_eos": request.ignore_eos,
            "seed": request.seed,
            "logprobs": 0,  # only of the sampled token
            "detokenize": False,
            **logit_bias(request),
        },
    }


def rating_body(token_ids: list[int], num_top: int) -> dict[str, Any]:
    return {
        "token_ids": token_ids,
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": num_top,  # besides that of the token itself
            "detokenize": False,
        },
    }


def parse_generation(source: str, request: GenerateRequest, body: Any) -> Generation:
    body = as_object(body, source)
    wanted = (
        "request_id, usage, and one choice with token_ids, logprobs, finish reason and "
        "weight_versions"
    )
    with reading(source, body, wanted):
        (choice,) = body["choices"]
        if choice["logprobs"] is None:
            raise LogprobsError(
                f"{source}: the answer holds no logprobs of its tokens, got {excerpt(body)}"
            )
        return checked_generation(
            source,
            request,
            sent_id=REQUEST_ID_PREFIX + request.request_id,
            answered_id=body["request_id"],
            num_prompt_tokens=body["usage"]["prompt_tokens"],
            token_ids=choice["token_ids"],
            logprobs=[(e["logprob"], e["token_id"]) for e in choice["logprobs"]["content"]],
            num_completion_tokens=body["usage"]["completion_tokens"],
            finish_reason=choice["finish_reason"],
            spans=[(s["version"], s["start"], s["end"]) for s in choice["weight_versions"]],
        )


def parse_logprobs(source: str, body: Any) -> list[float]:
    with reading(source, body, "one choice with logprobs"):
        (choice,) = body["choices"]
        return [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]


def parse_rating(
    source: str, token_ids: list[int], start: int, num_top: int, body: Any
) -> PromptRating:
    """Returns the rating of the tokens from ``start`` on.

    vLLM gives one object for each place, of the most likely tokens with their ranks and the token
    itself, which may be one of them.
    """
    rated = token_ids[start:]
    with reading(source, body, f"prompt_logprobs of the {len(token_ids)} tokens sent"):
        places = body["prompt_logprobs"]
        if len(places) != len(token_ids):
            raise ValueError(f"{len(places)} places")
        places = places[start:]
        entries = [(None, token_ids[start - 1])] + [
            (place[str(token)]["logprob"], token)
            for place, token in zip(places, rated, strict=True)
        ]
        rows = [
            [(e["logprob"], int(token)) for token, e in place.items() if e["rank"] <= num_top]
            for place in (places if num_top else ())
        ]
    return checked_rating(source, token_ids[start - 1 :], entries, rows, num_top)


def refuses_num_top(error: RouteError) -> bool:
    """Returns whether ``--max-logprobs`` is too small; vLLM names the field that it refuses."""
    if error.status != 400 or not isinstance(error.body, dict):
        return False
    reason = error.body.get("error")
    return isinstance(reason, dict) and reason.get("param") == "prompt_logprobs"


def parse_metrics(source: str, body: Any) -> ServerLoad:
    """Returns the load from ``/metrics``, in Prometheus' text format."""
    samples: dict[str, list[float]] = {_RUNNING: [], _WAITING: [], _KV_USE: []}
    for name, value in _SAMPLE.findall(body if isinstance(body, str) else ""):
        if name in samples:
            samples[name].append(to_number(value))
    missing = [name for name, values in samples.items() if not values]
    if missing:
        raise ServerError(
            f"{source} must hold {', '.join(missing)}, got {excerpt(body)}. Was the server "
            "started with --disable-log-stats?"
        )
    return checked_load(source, samples[_RUNNING], samples[_WAITING], samples[_KV_USE])
