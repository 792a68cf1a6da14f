# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the tool calls that a model wrote, in the form in which its chat template writes them.

The form is found by letting the template render a call. A call that cannot be read stays text, as
on inference servers.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torchtitan.grpo.rollout.chat_template import ChatTemplate

_NAME = "qzfunction"
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "?", "parameters": {"type": "object"}},
}


class ToolCall(NamedTuple):
    name: str
    arguments: str  # a JSON object


class Spoken(NamedTuple):
    """A message that a model wrote: the text beside its calls."""

    text: str
    calls: list[ToolCall]


Parser = Callable[[str, Sequence[dict[str, Any]]], Spoken]
"""Takes what a model wrote, and the tools that it was shown."""


def parser_of(template: ChatTemplate) -> Parser | None:
    """Returns the parser of the template's calls, or None if it writes none, or in no known form."""
    if not _prints_tools(template):
        return None
    written = _sample_call(template)
    for mark, parser in _PARSERS.items():
        if mark in written:
            return parser
    return None


def _prints_tools(template: ChatTemplate) -> bool:
    try:
        return _NAME in template.render([{"role": "user", "content": "?"}], tools=[_TOOL])
    except ValueError:
        return False


def _sample_call(template: ChatTemplate) -> str:
    """Returns a rendered call without what comes before it, where tools may be explained."""
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": _NAME, "arguments": {"k": "v"}},
    }
    begin = [{"role": "user", "content": "?"}]
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before = template.render(begin, opens_turn=False)
        return template.render([*begin, turn], opens_turn=False).removeprefix(before)
    except ValueError:
        return ""


def _parse_tagged(text: str, tools: Sequence[dict[str, Any]]) -> Spoken:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""
    return _cut_out(_TAGGED, text, lambda found: _json_call(found[1]))


def _parse_functions(text: str, tools: Sequence[dict[str, Any]]) -> Spoken:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder."""
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}

    def read(found: re.Match[str]) -> ToolCall:
        name = found[1].strip()
        schema = schemas.get(name, {}).get("parameters")
        arguments = {
            key.strip(): _typed(value, _get(_get(schema, "properties"), key.strip()))
            for key, value in _PARAMETER.findall(found[2])
        }
        return ToolCall(name, json.dumps(arguments, allow_nan=True))

    return _cut_out(_FUNCTION, text, read)


def _parse_plain(text: str, tools: Sequence[dict[str, Any]]) -> Spoken:
    """A message that is nothing but ``{"name": ..., "parameters": {...}}``: Llama 3."""
    stripped = text.strip().removeprefix("<|python_tag|>").strip()
    try:
        return Spoken("", [_json_call(part) for part in _json_values(stripped, separator=";")])
    except ValueError:
        return Spoken(text, [])


def _parse_marked(text: str, tools: Sequence[dict[str, Any]]) -> Spoken:
    """``[TOOL_CALLS]`` before a list of calls, or before each as ``NAME{...}``: Mistral."""
    before, *parts = text.split(_MARK)
    try:
        calls = [call for part in parts for call in _marked_calls(part.strip())]
    except ValueError:
        return Spoken(text, [])
    return Spoken(before if calls else text, calls)


def _marked_calls(part: str) -> Iterator[ToolCall]:
    if part.startswith("["):
        yield from (_json_call(call) for call in _json_values(part)[0])
        return
    name, brace, rest = part.partition("{")
    if not brace:
        raise ValueError("a call needs arguments")
    yield _json_call(
        {"name": name.strip().removesuffix("[ARGS]"), "arguments": read_json(brace + rest)}
    )


_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION = re.compile(
    r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MARK = "[TOOL_CALLS]"

# By what a rendered call contains, in the order in which they are tried.
_PARSERS: dict[str, Parser] = {
    f"<function={_NAME}>": _parse_functions,
    "<tool_call>": _parse_tagged,
    _MARK: _parse_marked,
    f'"{_NAME}"': _parse_plain,
}


def _cut_out(
    pattern: re.Pattern[str], text: str, read: Callable[[re.Match[str]], ToolCall]
) -> Spoken:
    calls: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        try:
            calls.append(read(found))
        except ValueError:
            return found[0]
        return ""

    rest = pattern.sub(take, text)
    return Spoken(rest.strip() if calls else text, calls)


def _json_call(value: Any) -> ToolCall:
    """Raises ValueError if that is no call."""
    call = read_json(value) if isinstance(value, str) else value
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        raise ValueError("a call needs a name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return ToolCall(call["name"], json.dumps(arguments, allow_nan=True))


def _json_values(text: str, separator: str = "") -> list[Any]:
    """Reads one or more JSON values. Raises ValueError if there is anything else."""
    decoder, found, rest = json.JSONDecoder(), [], text
    while True:
        try:
            value, end = decoder.raw_decode(rest)
        except RecursionError as error:
            raise ValueError(str(error)) from error
        found.append(value)
        rest = rest[end:].strip()
        if not rest:
            return found
        if not (separator and rest.startswith(separator)):
            raise ValueError(f"there is more behind a call: {rest!r:.50}")
        rest = rest.removeprefix(separator).strip()


def _get(value: Any, key: str) -> Any:
    """A part of a schema, which a client may have sent in any form."""
    return value.get(key) if isinstance(value, dict) else None


def _typed(value: str, schema: Any) -> Any:
    """The value of a parameter without quotes: text, unless its schema says otherwise."""
    kind = _get(schema, "type")
    if kind in (None, "string"):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def read_json(text: str) -> Any:
    """Raises ValueError, also if it is nested so deeply that it cannot be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
