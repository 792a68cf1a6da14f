# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The bodies of ``/v1/completions``, and of vLLM's ``/inference/v1/generate``, which takes token ids."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torchtitan.grpo.rollout.agents.exchange import (
    Answer,
    BadRequest,
    ModelAnswer,
    ModelRequest,
    shared_settings,
)


def read(body: Mapping[str, Any]) -> ModelRequest:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    settings: dict[str, Any] = shared_settings(body) | {
        "wants_logprobs": body.get("logprobs") is not None
    }
    if body.get("echo") or body.get("suffix"):
        raise BadRequest("echo and suffix are not supported: send neither.", param="echo")
    if isinstance(prompt, str):
        return ModelRequest(text=prompt, **settings)
    return ModelRequest(token_ids=_read_ids(prompt, "prompt"), **settings)


def read_ids_body(body: Mapping[str, Any]) -> ModelRequest:
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise BadRequest("sampling_params must be an object.", param="sampling_params")
    ids = _read_ids(body.get("token_ids"), "token_ids")
    return replace(
        ModelRequest(token_ids=ids, may_call=False, **shared_settings(sampling)), stream=False
    )


def _read_ids(value: Any, param: str) -> list[int]:
    is_list = isinstance(value, list) and value
    if not is_list or not all(isinstance(one, int) and one >= 0 for one in value):
        raise BadRequest(
            f"{param} must be one text or one list of token ids, got {value!r:.100}.", param=param
        )
    return list(value)


def write(answer: Answer, asked: ModelRequest) -> dict[str, Any]:
    choices = [_choice(choice, index, asked) for index, choice in enumerate(answer.choices)]
    head = answer.head("cmpl", "text_completion")
    return {**head, "choices": choices, "usage": answer.usage}


def stream(answer: Answer, asked: ModelRequest) -> Iterator[dict[str, Any]]:
    head = answer.head("cmpl", "text_completion")
    for index, choice in enumerate(answer.choices):
        yield head | {"choices": [_choice(choice, index, asked)]}
    if asked.wants_usage:
        yield head | {"choices": [], "usage": answer.usage}


def write_ids(answer: Answer, asked: ModelRequest) -> dict[str, Any]:
    choices = []
    for index, choice in enumerate(answer.choices):
        pairs = zip(choice.token_ids, choice.logprobs, strict=True)
        tokens = [{"token": f"token_id:{i}", "token_id": i, "logprob": value} for i, value in pairs]
        written = {"index": index, "token_ids": choice.token_ids, "logprobs": {"content": tokens}}
        choices.append(written | {"finish_reason": choice.finish_reason})
    return {"request_id": f"generate-{answer.number}", "choices": choices}


def _choice(choice: ModelAnswer, index: int, asked: ModelRequest) -> dict[str, Any]:
    logprobs = None
    if asked.wants_logprobs:
        offsets = accumulate((len(text) for text in choice.token_texts), initial=0)
        logprobs = {
            "tokens": choice.token_texts,
            "token_logprobs": choice.logprobs,
            "top_logprobs": None,
            "text_offset": list(offsets)[:-1],
        }
    return {
        "index": index,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": logprobs,
        **({"token_ids": choice.token_ids} if asked.wants_token_ids else {}),
    }
