# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the request bodies of ``/v1/chat/completions``, and writes the response bodies."""

from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.grpo.rollout.agents.exchange import (
    Answer,
    ModelAnswer,
    ModelRequest,
    read_messages,
    read_tools,
    shared_settings,
)


def read(body: Mapping[str, Any]) -> ModelRequest:
    return ModelRequest(
        messages=read_messages(body.get("messages")),
        tools=read_tools(body),
        may_call=body.get("tool_choice") != "none",
        continues=bool(body.get("continue_final_message")),
        wants_logprobs=bool(body.get("logprobs")),
        **shared_settings(body),
    )


def write(answer: Answer, asked: ModelRequest) -> dict[str, Any]:
    choices = []
    for index, choice in enumerate(answer.choices):
        written = {"index": index, "message": choice.message(), **_end(choice, asked)}
        choices.append(written | ({"token_ids": choice.token_ids} if asked.wants_token_ids else {}))
    extra = {"prompt_token_ids": answer.prompt_ids} if asked.wants_token_ids else {}
    head = answer.head("chatcmpl", "chat.completion")
    return {**head, "choices": choices, "usage": answer.usage, **extra}


def stream(answer: Answer, asked: ModelRequest) -> Iterator[dict[str, Any]]:
    """Yields a finished answer as the chunks of a streamed response."""
    head = answer.head("chatcmpl", "chat.completion.chunk")
    for index, choice in enumerate(answer.choices):
        message = choice.message()
        calls = message.pop("tool_calls", [])
        yield head | {"choices": [{"index": index, "delta": message, "finish_reason": None}]}
        for position, call in enumerate(calls):
            delta = {"tool_calls": [{"index": position, **call}]}
            yield head | {"choices": [{"index": index, "delta": delta, "finish_reason": None}]}
        yield head | {"choices": [{"index": index, "delta": {}, **_end(choice, asked)}]}
    if asked.wants_usage:
        yield head | {"choices": [], "usage": answer.usage}


def _end(choice: ModelAnswer, asked: ModelRequest) -> dict[str, Any]:
    logprobs = {"content": token_logprobs(choice)} if asked.wants_logprobs else None
    return {
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": logprobs,
    }


def token_logprobs(choice: ModelAnswer) -> list[dict[str, Any]]:
    values = zip(
        choice.token_ids, choice.token_texts, choice.token_bytes, choice.logprobs, strict=True
    )
    return [
        {
            "token": text,
            "token_id": token,
            "logprob": logprob,
            "bytes": list(own_bytes),
            "top_logprobs": [],
        }
        for token, text, own_bytes, logprob in values
    ]
