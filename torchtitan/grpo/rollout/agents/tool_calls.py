# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the tool calls that a model wrote, in the form in which its chat template writes them.

The form is found by letting the template render a call. What cannot be read as a whole call stays
text.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torchtitan.grpo import strict_json
from torchtitan.grpo.rollout.agents.tagged_calls import behind_end_tag, read_functions
from torchtitan.grpo.rollout.chat_template import ChatTemplate

CALL_MARKS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)  # fmt: skip
"""What marks calls: special tokens of some tokenizers, which the text of an answer then lacks."""
_NAME, _ARGUMENTS = "qzfunction", {"k": "v"}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "?", "parameters": {"type": "object"}},
}


class ToolCall(NamedTuple):
    name: str
    arguments: str  # a JSON object
    id: str = ""  # as the model wrote it


class Spoken(NamedTuple):
    """A message that a model wrote: the text beside its calls."""

    text: str
    calls: list[ToolCall]


Parser = Callable[[str, Sequence[dict[str, Any]]], Spoken]
"""Takes what a model wrote, and the tools that it was shown."""
_Read = Callable[[re.Match[str]], tuple[list[ToolCall], int]]
"""Reads the calls behind the match of their beginning, and where they end; raises ValueError."""


def parser_of(template: ChatTemplate) -> Parser | None:
    """Returns the parser of the template's calls, or None if it writes none, or in no known form."""
    if not _prints_tools(template):
        return None
    written, wanted = _sample_call(template), (_NAME, json.dumps(_ARGUMENTS))
    for parser in _PARSERS.values():
        if [call[:2] for call in parser(written, [_TOOL]).calls] == [wanted]:
            return parser
    return None


def _prints_tools(template: ChatTemplate) -> bool:
    try:
        return _NAME in template.render([{"role": "user", "content": "?"}], tools=[_TOOL])
    except ValueError:
        return False


def _sample_call(template: ChatTemplate) -> str:
    """Returns a rendered call without what comes before it, where tools may be explained."""
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    begin = [{"role": "user", "content": "?"}]
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        rendered = template.render([*begin, turn], opens_turn=False)
        before = template.render(begin)
        if not rendered.startswith(before):  # earlier turns may begin without thinking
            before = template.render(begin, opens_turn=False)
        return rendered.removeprefix(before)
    except ValueError:
        return ""


def _parse_json_tags(text: str, tools: Sequence[dict[str, Any]]) -> Spoken:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""

    def read(found: re.Match[str]) -> tuple[list[ToolCall], int]:
        calls, end = _json_calls(text, found.end())
        behind = behind_end_tag(text, end)
        if behind is None:
            raise ValueError("there is more behind a call")
        return calls, behind

    return _cut_out(text, _TAG, read)


def _parse_xml(text: str, tools: Sequence[dict[str, Any]]) -> Spoken:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}

    def read(found: re.Match[str]) -> tuple[list[ToolCall], int]:
        calls, end = read_functions(text, found.start(2), schemas, has_tag=bool(found[1]))
        return [ToolCall(name, json.dumps(arguments)) for name, arguments in calls], end

    return _cut_out(text, _FUNCTION, read)


def _parse_marked(text: str, tools: Sequence[dict[str, Any]]) -> Spoken:
    """``[TOOL_CALLS]`` before a list of calls, or before each as ``NAME[ARGS]{...}``: Mistral."""

    def read(found: re.Match[str]) -> tuple[list[ToolCall], int]:
        if found[1] is None:
            return _json_calls(text, found.end())
        return _named_call(text, found.end(), found[1], found[2])

    return _cut_out(text, _MARK, read)


def _parse_separated(text: str, tools: Sequence[dict[str, Any]]) -> Spoken:
    """``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``: DeepSeek V3.1; V3 and R1 with code fences."""

    def read(found: re.Match[str]) -> tuple[list[ToolCall], int]:
        calls, end = _named_call(text, found.end(), found[1] or found[2])
        behind = _SEPARATED_END.match(text, end)
        return calls, behind.end() if behind else end

    return _cut_out(text, _SEPARATED, read)


def _parse_plain(text: str, tools: Sequence[dict[str, Any]]) -> Spoken:
    """A message that begins with ``{"name": ..., "parameters": {...}}``: Llama 3.

    Without a mark, JSON is a call only if it names a given tool and has arguments.
    """
    before, mark, rest = text.partition("<|python_tag|>")
    if not mark:
        before, rest = "", text
    names = None if mark else [tool["function"]["name"] for tool in tools]
    calls: list[ToolCall] = []
    rest = rest.lstrip()
    while rest:
        try:
            found, end = _json_calls(rest, 0, names)
        except ValueError:
            break
        calls, rest = calls + found, rest[end:].lstrip("; \t\r\n")
    return Spoken((before + rest).strip(), calls) if calls else Spoken(text, [])


_TAG = re.compile(r"<tool_call>\s*")
_FUNCTION = re.compile(r"(?:(<tool_call>)\s*|^[ \t]*)(<function=)", re.MULTILINE)
_MARK = re.compile(
    r"\[TOOL_CALLS\]\s*(?:([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?)?"
)
_SEPARATED = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
    r"(?:function<｜tool▁sep｜>([^\n<]+)\n```json\s*|([^\n<]+)<｜tool▁sep｜>\s*)"
)
_SEPARATED_END = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")
_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")

# Tried in this order on a call that the template has rendered.
_PARSERS: dict[str, Parser] = {
    "Qwen3-Coder": _parse_xml,
    "Hermes": _parse_json_tags,
    "Mistral": _parse_marked,
    "DeepSeek": _parse_separated,
    "Llama 3": _parse_plain,
}


def _cut_out(text: str, begin: re.Pattern[str], read: _Read) -> Spoken:
    """Takes the calls out of a text, which it would stay if there are none."""
    calls: list[ToolCall] = []
    kept, place = [], 0
    while found := begin.search(text, place):
        try:
            new, end = read(found)
        except ValueError:
            new, end = [], found.end()
        kept.append(text[place : found.start() if new else end])
        calls, place = calls + new, end
    return Spoken("".join([*kept, text[place:]]).strip(), calls) if calls else Spoken(text, [])


def _json_calls(
    text: str, place: int, names: Collection[str] | None = None
) -> tuple[list[ToolCall], int]:
    """Reads a call, or a list of calls, of the functions with these names; raises ValueError."""
    value, end = strict_json.load_at(text, place)
    values = value if isinstance(value, list) else [value]
    if not values or any(names is not None and not _is_of(one, names) for one in values):
        raise ValueError("this is no call of a tool")
    return [_call(one) for one in values], end


def _is_of(call: Any, names: Collection[str]) -> bool:
    has_arguments = isinstance(call, dict) and ("arguments" in call or "parameters" in call)
    return has_arguments and call.get("name") in names


def _named_call(
    text: str, place: int, name: str, call_id: str | None = None
) -> tuple[list[ToolCall], int]:
    """Reads the arguments of a call whose name stands before them."""
    arguments, end = strict_json.load_at(text, place)
    return [_call({"name": name.strip(), "arguments": arguments, "id": call_id})], end


def _call(value: Any) -> ToolCall:
    """Raises ValueError if that is no call."""
    if not (isinstance(value, dict) and isinstance(name := value.get("name"), str) and name):
        raise ValueError("a call needs a name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments:
        arguments = strict_json.loads(arguments)
    if not isinstance(arguments := {} if arguments in (None, "") else arguments, dict):
        raise ValueError("arguments must be an object")
    call_id = value.get("id")
    is_valid = isinstance(call_id, str) and _CALL_ID.fullmatch(call_id)
    return ToolCall(name, json.dumps(arguments), call_id if is_valid else "")
