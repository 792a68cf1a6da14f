# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One request for what the model writes, and its answer, whichever route they take."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.grpo import strict_json
from torchtitan.grpo.rollout.agents.tool_calls import ToolCall
from torchtitan.grpo.rollout.agents.transcript import Message

_MOST_CHOICES = 64
SAMPLING = ("temperature", "top_p", "top_k", "seed")
"""Parameters of requests by which ``agent.allow_sampling`` replaces the run's."""
_IS_VALID: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: 0 <= value <= 100,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: isinstance(value, int) and value >= -1,
    "seed": lambda value: isinstance(value, int),
}
_DEFAULTS: dict[str, Any] = {
    "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1,
    "logit_bias": {}, "response_format": {"type": "text"}, "min_tokens": 0,
    "parallel_tool_calls": True, "structured_outputs": {}, "text.format": {"type": "text"},
    "tool_choice": "auto",
}  # fmt: skip
"""Parameters that are not supported, with the value that means nothing."""


class BadRequest(ValueError):
    """A request cannot be answered; ``param`` and ``code`` are those of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Asked:
    """A request for ``number`` answers to either ``messages``, a ``text``, or ``token_ids``.

    Attributes:
        continues: Whether the last message, which is the assistant's, is to be continued.
        may_call: Whether tool calls are read from the answer.
        sampling: The parameters of :data:`SAMPLING` that were sent.
        ignored: Names of other parameters that would change what is sampled.
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
class Choice:
    """One answer. ``finish_reason`` is OpenAI's: ``stop``, ``length`` or ``tool_calls``.

    ``stop_reason`` is the stop string that ended it, as vLLM tells it, or None.
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
    """``number`` is unique in the endpoint; ``created`` is in Unix seconds."""

    number: str
    created: int
    model: str
    prompt_ids: list[int]
    choices: list[Choice]

    @property
    def usage(self) -> dict[str, int]:
        num_written = sum(len(choice.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": num_written,
            "total_tokens": len(self.prompt_ids) + num_written,
        }


def shared_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Reads what the routes of chat and of plain text have in common."""
    number = _typed(body, "n", int, 1)
    if not 1 <= number <= _MOST_CHOICES:
        raise BadRequest(f"n must be in [1, {_MOST_CHOICES}], got {number}.", param="n")
    return {
        "number": number,
        "stop": stop_strings(body),
        "max_tokens": read_length(body, "max_completion_tokens", "max_tokens"),
        "sampling": sampling_of(body),
        "ignored": ignored_in(body),
        "stream": _typed(body, "stream", bool, False),
        "wants_usage": bool(_typed(body, "stream_options", dict, {}).get("include_usage")),
        "wants_token_ids": _typed(body, "return_token_ids", bool, False),
    }


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    for name, value in found.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and _IS_VALID[name](value)):
            raise BadRequest(f"{name} = {value!r:.100} is not a possible value.", param=name)
    if found.get("top_k") == 0:  # off, as on vLLM
        found["top_k"] = -1
    return found


def ignored_in(body: Mapping[str, Any]) -> tuple[str, ...]:
    text, asked = body.get("text"), dict(body)
    if isinstance(text, dict):  # of the route of responses
        asked["text.format"] = text.get("format")
    if asked.get("tool_choice") == "none":  # which is not ignored
        del asked["tool_choice"]
    return tuple(name for name, off in _DEFAULTS.items() if asked.get(name, off) not in (off, None))


def stop_strings(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stop, list) and all(isinstance(one, str) and one for one in stop)):
        raise BadRequest(
            f"stop must be a string or a list of strings, got {stop!r:.100}.", param="stop"
        )
    return tuple(stop)


def read_length(body: Mapping[str, Any], *names: str) -> int | None:
    """Returns the first limit that is given under one of these names."""
    for name in names:
        value = _typed(body, name, int, None)
        if value is not None:
            if value < 1:
                raise BadRequest(f"{name} must be at least 1, got {value}.", param=name)
            return value
    return None


def _typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(f"{name} must be of type {kind.__name__}, got {value!r:.100}.", param=name)
    return value


def read_messages(value: Any, param: str = "messages") -> list[Message]:
    """Returns messages as chat templates take them. Raises BadRequest for anything but text."""
    if not (isinstance(value, list) and value):
        raise BadRequest(f"{param} must be a list of messages, got {value!r:.100}.", param=param)
    return [_read_message(message, f"{param}[{i}]") for i, message in enumerate(value)]


def _read_message(message: Any, param: str) -> Message:
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise BadRequest(f"{param} must be an object with a role.", param=param)
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    read: Message = {"role": role, "content": read_text(message.get("content"), param)}
    read |= {
        name: message[name]
        for name in ("name", "tool_call_id", "reasoning_content")
        if isinstance(message.get(name), str)
    }
    if calls := _typed(message, "tool_calls", list, []):
        read["tool_calls"] = [_read_call(call, param) for call in calls]
    return read


def read_text(content: Any, param: str) -> str:
    """Joins the parts of a content, which must all be text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    found = [part.get("text", part.get("refusal")) for part in parts if isinstance(part, dict)]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) != len(parts):
        raise BadRequest(
            f"{param}.content must be text, got {content!r:.100}. The model reads only text.",
            param=param,
        )
    return "".join(texts)


def _read_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise BadRequest(f"{param}.tool_calls must name functions, got {call!r:.100}.", param=param)
    return make_call(str(call.get("id", "")), function["name"], function.get("arguments"))


def make_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Makes a call as chat templates take it, with its arguments as an object."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # shown as it is
            arguments = strict_json.loads(arguments)
    function = {"name": name, "arguments": {} if arguments in (None, "") else arguments}
    return {"id": call_id, "type": "function", "function": function}


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the functions among the tools, in the form of the chat route."""
    found = []
    for i, tool in enumerate(_typed(body, "tools", list, [])):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise BadRequest(
                f"tools[{i}] must be a function with a name, got {tool!r:.100}. Tools that a "
                "provider runs itself are not supported.",
                param=f"tools[{i}]",
            )
        kept = ("name", "description", "parameters")
        found.append(
            {
                "type": "function",
                "function": {k: function[k] for k in kept if function.get(k) is not None},
            }
        )
    return found
