# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests to the model and their answers, in one form for all routes of the endpoint."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from torchtitan.grpo.rollout.agents.tool_calls import ToolCall
from torchtitan.grpo.rollout.agents.transcript import Message
from torchtitan.grpo.rollout.chat_template import text_of
from torchtitan.grpo.system import strict_json

_MOST_CHOICES, _MOST_TOLD = 64, 32
SAMPLING = ("temperature", "top_p", "top_k", "seed")
"""Parameters of requests that replace the run's if ``agent.allow_sampling`` is set."""
_DEFAULTS: dict[str, Any] = {
    "repetition_penalty": 1, "length_penalty": 1, "best_of": 1, "response_format": {"type": "text"},
    "text.format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": True,
    "modalities": ["text"], "truncation": "disabled", "add_generation_prompt": True,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_reasoning": True,
}  # fmt: skip
"""Unsupported parameters with the value that asks for nothing; for others, that is any empty value."""
_HARMLESS = {
    "background", "cache_salt", "continue_final_message", "detokenize", "echo", "include", "input",
    "instructions", "logprobs", "messages", "metadata", "model", "previous_response_id", "priority",
    "prompt", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier",
    "service_tier", "store", "suffix", "text", "token_ids", "tools", "top_logprobs", "user",
}  # fmt: skip
"""Parameters that a route reads, or that do not change what is sampled."""


class BadRequest(ValueError):
    """A request cannot be answered. ``param`` and ``code`` are fields of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class ModelRequest:
    """A request for ``number`` answers to either ``messages``, a ``text``, or ``token_ids``.

    Attributes:
        continues: Whether the last message, which is the assistant's, is to be continued.
        may_call: Whether tool calls are parsed from the answer.
        sampling: Those of the request's parameters that are in :data:`SAMPLING`.
        ignored: Names of unsupported parameters that would change what is sampled.
    """

    messages: list[Message] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    may_call: bool = True
    continues: bool = False
    number: int = 1
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    stream: bool = False
    wants_usage: bool = False
    wants_logprobs: bool = False
    wants_token_ids: bool = False


@dataclass(frozen=True)
class ModelAnswer:
    """One answer. ``finish_reason`` is OpenAI's: ``stop``, ``length`` or ``tool_calls``.

    ``stop_reason`` is the stop string that ended the answer, or None, as in vLLM.
    """

    token_ids: list[int]
    token_texts: list[str]
    token_bytes: list[bytes]
    logprobs: list[float]
    finish_reason: str
    text: str
    stop_reason: str | None = None
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """The message as chat clients receive it and send it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments, one in self.calls
            ]
        return message


@dataclass(frozen=True)
class Answer:
    """The answers to one request. ``number`` is unique in the endpoint, and ``created`` is in Unix seconds."""

    number: str
    created: int
    model: str
    prompt_ids: list[int]
    choices: list[ModelAnswer]

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        number, created = f"{prefix}-{self.number}", self.created
        return {"id": number, "object": kind, "created": created, "model": self.model}

    @property
    def usage(self) -> dict[str, int]:
        shown, written = len(self.prompt_ids), sum(len(one.token_ids) for one in self.choices)
        total = shown + written
        return {"prompt_tokens": shown, "completion_tokens": written, "total_tokens": total}


class _Settings(msgspec.Struct):
    """Fields that request bodies of all routes may have. A null field counts as missing."""

    n: Annotated[int, Meta(ge=1, le=_MOST_CHOICES)] | None = None
    stop: str | list[Annotated[str, Meta(min_length=1)]] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None


def shared_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that all routes share, as arguments for :class:`ModelRequest`."""
    try:
        read = msgspec.convert(body, _Settings)
    except msgspec.ValidationError as error:
        param = str(error).partition("`$.")[2].rstrip("`")
        given = f"{error}, which is {body.get(param.partition('[')[0])!r:.100}"
        raise BadRequest(f"The request cannot be used: {given}.", param=param) from error
    sampling = {name: getattr(read, name) for name in SAMPLING}
    if read.top_k == 0:  # off, as on vLLM
        sampling["top_k"] = -1
    stop = read.stop or []
    return {
        "number": read.n or 1,
        "stop": tuple([stop] if isinstance(stop, str) else stop),
        "max_tokens": read.max_completion_tokens or read.max_tokens or read.max_output_tokens,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "ignored": _ignored_in(body),
        "stream": read.stream or False,
        "wants_usage": bool((read.stream_options or {}).get("include_usage")),
        "wants_token_ids": read.return_token_ids or False,
    }


def _ignored_in(body: Mapping[str, Any]) -> tuple[str, ...]:
    text, asked = body.get("text"), dict(body)
    if isinstance(text, dict):  # of the route of responses
        asked |= {f"text.{name}": value for name, value in text.items()}
    known = _HARMLESS.union(_Settings.__struct_fields__)
    known |= {"tool_choice"} if asked.get("tool_choice") == "none" else set()
    known |= {"add_generation_prompt"} if asked.get("continue_final_message") else set()
    is_asked = {k: v not in (_DEFAULTS.get(k), None) for k, v in asked.items() if k not in known}
    ignored = [k for k, is_other in is_asked.items() if is_other and (asked[k] or k in _DEFAULTS)]
    return tuple(ignored[:_MOST_TOLD])


def _list_in(body: Mapping[str, Any], name: str) -> list[Any]:
    found = body.get(name) or []
    if not isinstance(found, list):
        raise BadRequest(f"{name} must be a list, got {found!r:.100}.", param=name)
    return found


def read_messages(value: Any, param: str = "messages") -> list[Message]:
    """Returns messages in the form for chat templates. Raises BadRequest if one is malformed or not text."""
    if not (isinstance(value, list) and value):
        raise BadRequest(f"{param} must be a list of messages, got {value!r:.100}.", param=param)
    return [_read_message(message, f"{param}[{i}]") for i, message in enumerate(value)]


def _read_message(message: Any, param: str) -> Message:
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise BadRequest(f"{param} must be an object with a role.", param=param)
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    read: Message = {"role": role, "content": read_text(message, param)}
    kept = ("name", "tool_call_id", "reasoning_content")
    read |= {name: message[name] for name in kept if isinstance(message.get(name), str)}
    called = message.get("function_call")  # as clients wrote one before there were tools
    if calls := _list_in(message, "tool_calls") or ([{"function": called}] if called else []):
        read["tool_calls"] = [_read_call(call, param) for call in calls]
    return read


def read_text(message: Mapping[str, Any], param: str) -> str:
    """Joins the parts of a message's content, which must all be text."""
    content = message.get("content")
    try:
        text = text_of({**message, "content": [content] if isinstance(content, dict) else content})
    except ValueError as error:
        raise BadRequest(f"{param} has {error}. The model reads only text.", param=param) from error
    if not isinstance(text, str | None):
        raise BadRequest(f"{param}.content must be text, got {content!r:.100}.", param=param)
    return text or ""


def _read_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise BadRequest(f"{param}.tool_calls must name functions, got {call!r:.100}.", param=param)
    return make_call(str(call.get("id", "")), function["name"], function.get("arguments"))


def make_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Makes a tool call in the form for chat templates, with its arguments parsed from JSON."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # shown as it is
            arguments = strict_json.loads(arguments)
    function = {"name": name, "arguments": {} if arguments in (None, "") else arguments}
    return {"id": call_id, "type": "function", "function": function}


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools in the form of the chat route. Raises BadRequest if one is not a function."""
    found = []
    for i, tool in enumerate(_list_in(body, "tools")):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise BadRequest(
                f"tools[{i}] must be a function with a name, got {tool!r:.100}. Tools that a "
                "provider runs itself are not supported.",
                param=f"tools[{i}]",
            )
        kept = {k: function.get(k) for k in ("name", "description", "parameters")}
        function = {k: value for k, value in kept.items() if value is not None}
        found.append({"type": "function", "function": function})
    return found
