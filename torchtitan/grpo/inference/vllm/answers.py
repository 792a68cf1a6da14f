# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds requests to vLLM's routes for generation and load, and parses their answers.

Also finds out from answers which options the server was started with.
"""

import re
from dataclasses import asdict, dataclass, field
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
from torchtitan.grpo.inference.http import HttpConnection, RouteError, excerpt
from torchtitan.grpo.types import GenerateRequest, Generation
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

GENERATE_ROUTE = "/inference/v1/generate"

REQUEST_ID_PREFIX = "generate-tokens-"
"""The server prepends this to the id of a request, and aborts by the whole id."""
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USE = "vllm:kv_cache_usage_perc"
_PREFILL = "vllm:request_prefill_time_seconds_sum"
_DECODE = "vllm:request_decode_time_seconds_sum"
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def generate_body(request: GenerateRequest) -> dict[str, Any]:
    """Returns the body of a request. It sets every value that vLLM would else take from
    ``generation_config.json``."""
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
    """Returns the logprobs of a sequence's tokens from ``start`` on.

    vLLM answers with one object for each position. The object holds the most likely tokens with their ranks,
    and the sequence's own token, which may be one of them.
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
    """Returns whether vLLM refused a request because it asked for more top tokens than ``--max-logprobs``."""
    if error.status != 400 or not isinstance(error.body, dict):
        return False
    reason = error.body.get("error")
    return isinstance(reason, dict) and reason.get("param") == "prompt_logprobs"


def parse_metrics(source: str, body: Any) -> ServerLoad:
    """Returns the load from ``/metrics``, in Prometheus' text format."""
    needed = (_RUNNING, _WAITING, _KV_USE)
    samples: dict[str, list[float]] = {name: [] for name in (*needed, _PREFILL, _DECODE)}
    for name, value in _SAMPLE.findall(body if isinstance(body, str) else ""):
        if name in samples:
            samples[name].append(to_number(value))
    missing = [name for name in needed if not samples[name]]
    if missing:
        raise ServerError(
            f"{source} must hold {', '.join(missing)}, got {excerpt(body)}. Was the server "
            "started with --disable-log-stats?"
        )
    return checked_load(source, *samples.values())


GUARD = "torchtitan.grpo.inference.vllm.guard.VllmGuard"
"""Class that vLLM puts before its HTTP routes."""

NO_ROOM = "no room to stage"
"""Part of the error message of a worker without memory for a second copy of the weights."""

NO_DEV_MODE = "its environment lacks VLLM_SERVER_DEV_MODE=1, so that weights cannot be pushed"
NO_SCALE_OUT = "it was started without --enable-scale-out, so that it takes no token ids"
NO_TRANSFER = (
    'it was started without --weight-transfer-config \'{"backend": "torchtitan_grpo"}\' (or its '
    "environment lacks this project's plugin), so that weights cannot be pushed"
)
WRONG_LOGPROBS = (
    "it was started without --logprobs-mode processed_logprobs, so that its logprobs are those "
    "before rollout.temperature"
)
NO_GUARD = (
    "its routes for weights and for /collective_rpc ask for no key. Start it with --middleware "
    f"{GUARD} and the keys in its environment, as scripts/serve_vllm.sh does"
)
ALL_OPTIONS = (
    "a command of your own needs all of VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --logprobs-mode "
    'processed_logprobs and --weight-transfer-config \'{"backend": "torchtitan_grpo"}\''
)

_OUTSIDE_VOCABULARY = 2**31 - 1
_VOCABULARY = re.compile(r"[Vv]ocabulary size: (\d+)")
_MISSING = (404, 405)
# vLLM answers 400 or 500 if its weight transfer engine refuses.
_REFUSED = (400, 404, 405, 500)


@dataclass
class Examined:
    """The result of :func:`examine`. ``can_generate`` tells whether the server has the route for token ids."""

    vocab_size: int | None = None
    can_generate: bool = True
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


async def examine(http: HttpConnection) -> Examined:
    """Finds out whether the server was started with the options that a run needs. Does not change the server.

    Each option is recognized by how a route behaves, because ``/server_info`` takes half a minute.
    """
    found = Examined()
    # Refused before it is generated: the refusal tells the size of the vocabulary.
    bias = {str(_OUTSIDE_VOCABULARY): 1.0}
    sampling = {"max_tokens": 1, "logit_bias": bias, "detokenize": False}
    body = {"token_ids": [0], "stream": False, "sampling_params": sampling}
    answer = await http.post(GENERATE_ROUTE, body, scope="generation", accept=(400, 403, 404))
    size = _VOCABULARY.search(excerpt(answer.body))
    if answer.status == 400 and size is not None:
        found.vocab_size = int(size[1])
    elif answer.status in (403, 404):
        found.can_generate = False
        found.problems.append(NO_SCALE_OUT)
    if (await http.get("/weight_info", accept=_MISSING)).status != 200:
        found.problems.append(NO_DEV_MODE)
    else:
        if http.has_keys:
            unasked = await http.get("/weight_info", scope="public", accept=(*_MISSING, 401, 403))
            if unasked.status == 200:
                found.warnings.append(NO_GUARD)
        # A probe for room joins no group; see the plugin's engine.
        probe = asdict(WeightGroupInfo("", 0, 0, 0, "", "gloo", 1.0)) | {"probe": True}
        route = "/init_weight_transfer_engine"
        answer = await http.post(route, {"init_info": probe}, accept=_REFUSED)
        if answer.status != 200 and NO_ROOM not in (text := excerpt(answer.body)):
            found.problems.append(f"{NO_TRANSFER} ({route} answered: {text[:200]})")
    return found
