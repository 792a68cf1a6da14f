# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads and writes the bodies of ``/v1/responses``, whose conversations are lists of items."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torchtitan.grpo.rollout.agents.exchange import (
    Answer,
    BadRequest,
    ModelAnswer,
    ModelRequest,
    make_call,
    read_text,
    read_tools,
    shared_settings,
)
from torchtitan.grpo.rollout.agents.transcript import Message


def read(body: Mapping[str, Any], earlier: list[Message]) -> ModelRequest:
    """Parses a body. ``earlier``: the conversation of ``previous_response_id`` without instructions."""
    given = body.get("instructions")
    text = read_text({"content": given}, "instructions")
    system: list[Message] = [{"role": "system", "content": text}] if given else []
    asked = ModelRequest(
        messages=[*system, *earlier, *read_items(body.get("input"))],
        tools=read_tools(body),
        may_call=body.get("tool_choice") != "none",
        **shared_settings(body),
    )
    return replace(asked, number=1)


def read_items(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not (isinstance(value, list) and value):
        raise BadRequest(
            f"input must be text or a list of items, got {value!r:.100}.", param="input"
        )
    messages: list[Message] = []
    for i, item in enumerate(value):
        _read_item(item, messages, f"input[{i}]")
    return messages


def _read_item(item: Any, messages: list[Message], param: str) -> None:
    """Appends an item to ``messages``. The items of one answer, its text and calls, become one message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = str(item.get("role"))
        role = {"developer": "system"}.get(role, role)
        messages.append({"role": role, "content": read_text(item, param)})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = make_call(item.get("call_id", ""), item.get("name", ""), item.get("arguments"))
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = read_text({"content": item.get("output")}, param)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":
        raise BadRequest(
            f"{param} must be a message, a function call or its output, got {item!r:.100}.",
            param=param,
        )


def write(answer: Answer, asked: ModelRequest) -> dict[str, Any]:
    (choice,) = answer.choices
    is_cut = choice.finish_reason == "length"
    usage = answer.usage
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": answer.model,
        "output": _items(answer, choice),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [
            {"type": "function", "strict": False, **tool["function"]} for tool in asked.tools
        ],
        "top_p": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def stream(answer: Answer, asked: ModelRequest) -> Iterator[dict[str, Any]]:
    """Yields a finished answer as the events of a streamed response."""
    whole = write(answer, asked)
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(whole["output"]):
        events += _item_events(item, index)
    end = "response.completed" if whole["status"] == "completed" else "response.incomplete"
    events.append({"type": end, "response": whole})
    for number, event in enumerate(events):
        yield event | {"sequence_number": number}


def _item_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index}
    opened = item | {"status": "in_progress"}
    if item["type"] == "message":
        (part,) = item["content"]
        inner = place | {"content_index": 0}
        empty, text = part | {"text": ""}, {"text": part["text"], "logprobs": []}
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": opened | {"content": []},
        }
        yield {"type": "response.content_part.added", **inner, "part": empty}
        delta = {"delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.delta", **inner, **delta}
        yield {"type": "response.output_text.done", **inner, **text}
        yield {"type": "response.content_part.done", **inner, "part": part}
    else:
        arguments = item["arguments"]
        empty = opened | {"arguments": ""}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        done = {"arguments": arguments, "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **place, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _items(answer: Answer, choice: ModelAnswer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{answer.number}",
                "role": "assistant",
                "status": "incomplete" if choice.finish_reason == "length" else "completed",
                "content": [part],
            }
        )
    for call in choice.calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items
