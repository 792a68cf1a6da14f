# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the tool calls that a model wrote, in the form in which its chat template writes them.

The form is found by letting the template render a call. What cannot be read as a whole call stays
text.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torchtitan.grpo.rollout.agents.tagged_calls import FUNCTION, read_function
from torchtitan.grpo.rollout.chat_template import ChatTemplate
from torchtitan.grpo.system import strict_json

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
    id: str = ""  # empty if the model wrote none


class ParsedAnswer(NamedTuple):
    """A message that a model wrote: the text beside its calls."""

    text: str
    calls: list[ToolCall]


Parser = Callable[[str, Sequence[dict[str, Any]]], ParsedAnswer]
"""Takes what a model wrote, and the tools that it was shown."""
_Read = Callable[[re.Match[str], Sequence[dict[str, Any]]], tuple[list[ToolCall], int]]
"""Reads the calls behind the match of a beginning, and where they, or what is no call, end."""


def parser_of(template: ChatTemplate) -> Parser | None:
    """Returns the parser of the template's calls, or None if it writes none, or in no known form."""
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    begin = [{"role": "user", "content": "?"}]
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        if _NAME not in template.render(begin, tools=[_TOOL]):
            return None
        written, before = template.render([*begin, turn], opens_turn=False), template.render(begin)
    except ValueError:
        return None
    wanted = [(_NAME, json.dumps(_ARGUMENTS, allow_nan=False))]
    for parser in PARSERS.values():
        if [call[:2] for call in parser(written.removeprefix(before), [_TOOL]).calls] == wanted:
            return parser
    return None


def _cut_out(
    begin: re.Pattern[str], read: _Read, text: str, tools: Sequence[dict[str, Any]]
) -> ParsedAnswer:
    calls: list[ToolCall] = []
    kept, place = [], 0
    while found := begin.search(text, place):
        new, end = read(found, tools)
        kept.append(text[place : found.start() if new else end])
        calls, place = calls + new, end
    return (
        ParsedAnswer("".join([*kept, text[place:]]).strip(), calls)
        if calls
        else ParsedAnswer(text, [])
    )


def _json_form(begin: str, end: str) -> Parser:
    """Makes a parser of calls in JSON between two patterns; ``begin`` may have a name and an id."""
    ends = re.compile(end)

    def read(found: re.Match[str], tools: object) -> tuple[list[ToolCall], int]:
        groups, text = found.groupdict(), found.string
        with contextlib.suppress(ValueError):
            value, place = strict_json.load_at(text, found.end())
            if groups.get("name"):
                value = {"name": found["name"], "arguments": value, "id": groups.get("id")}
            if behind := ends.match(text, place):
                return _calls(value), behind.end()
        return [], next(_UNREADABLE.finditer(text, found.end())).end()

    return functools.partial(_cut_out, re.compile(begin), read)


def _read_functions(
    found: re.Match[str], tools: Sequence[dict[str, Any]]
) -> tuple[list[ToolCall], int]:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    with contextlib.suppress(ValueError):
        name, arguments, end = read_function(found, schemas)
        return [ToolCall(name, json.dumps(arguments, allow_nan=False))], end
    return [], len(found.string)  # what a call without an end quotes is no call


def _parse_plain(text: str, tools: Sequence[dict[str, Any]]) -> ParsedAnswer:
    """JSON without end marks is a call only if it names a given tool and has arguments."""
    names = [tool["function"]["name"] for tool in tools]
    is_json = text.lstrip().startswith(("{", "["))
    before = "" if is_json else text.partition("<|python_tag|>")[0]
    calls, end = [], len(before)
    while (place := next(_BETWEEN.finditer(text, end)).end()) < len(text):
        try:
            value, end = strict_json.load_at(text, place)
            calls += _calls(value, names)
        except ValueError:
            break
    return ParsedAnswer((before + text[place:]).strip(), calls) if calls else ParsedAnswer(text, [])


_FUNCTION = re.compile(rf"(?m)(?:<tool_call>\s*|^[ \t]*|(?<=</function>)\s*){FUNCTION}")
_BETWEEN = re.compile(r"(?:[;\s]|<\|python_tag\|>)*")
# What was meant as JSON, until a mark: those in its strings are quoted.
_MARKS = "|".join(map(re.escape, CALL_MARKS))
_UNREADABLE = re.compile(
    rf"""(?s:[^"'<\[]+|"(?:[^"\\]|\\.)*(?:"|\Z)|'(?:[^'\\]|\\.)*(?:'|\Z)|(?!{_MARKS}).)*+"""
)
_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")

# Tried in this order on a call that the template has rendered.
PARSERS: dict[str, Parser] = {
    # <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    "Qwen3-Coder": functools.partial(_cut_out, _FUNCTION, _read_functions),
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, which Qwen 2.5 and 3 write as well
    "Hermes": _json_form(r"<tool_call>\s*(?=\{|\[\s*\{)", r"\s*(?:</tool_call>|(?:</?[a-z_]*)?\Z)"),
    # [TOOL_CALLS] before a list of calls, or before each as NAME[CALL_ID]ID[ARGS]{...}
    "Mistral": _json_form(
        r"\[TOOL_CALLS\]\s*(?:(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?"
        r"(?:\[ARGS\]\s*)?(?=\{|null)|(?=\{|\[\s*\{))",
        "",
    ),
    # V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>. V3 and R1: function
    # <｜tool▁sep｜>NAME, and the arguments as a block of code.
    "DeepSeek": _json_form(
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        r"(?P<name>[^\s<]+)(?:\n```json|<｜tool▁sep｜>)\s*(?=\{|null)",
        r"\s*`{0,3}\s*(?:<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?|<｜tool▁calls▁end｜>"
        r"|(?=<｜tool▁call▁begin｜>)|(?:<[^<>]*)?\Z)",
    ),
    # A message that begins with {"name": ..., "parameters": {...}}
    "Llama 3": _parse_plain,
}


def _calls(value: Any, names: Collection[str] | None = None) -> list[ToolCall]:
    """Reads a call, or a list of calls; with ``names``, of these functions. Raises ValueError."""
    found = [_call(one, names) for one in (value if isinstance(value, list) else [value])]
    if not found:
        raise ValueError("there is no call")
    return found


def _call(value: Any, names: Collection[str] | None) -> ToolCall:
    if not (isinstance(value, dict) and isinstance(name := value.get("name"), str) and name):
        raise ValueError("a call needs a name")
    arguments = value.get("arguments", value.get("parameters", ""))
    if names is not None and (name not in names or arguments == ""):
        raise ValueError("this is no call of a tool")
    if isinstance(arguments, str) and arguments:
        arguments = strict_json.loads(arguments)
    if not isinstance(arguments := {} if arguments in (None, "") else arguments, dict):
        raise ValueError("arguments must be an object")
    call_id = str(value.get("id"))
    return ToolCall(
        name, json.dumps(arguments, allow_nan=False), call_id if _CALL_ID.fullmatch(call_id) else ""
    )
