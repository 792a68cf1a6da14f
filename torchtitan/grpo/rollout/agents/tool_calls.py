# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Parses the tool calls that a model wrote, in the format of its chat template.

The format is detected by letting the template render a call. What cannot be parsed as a complete
call remains text.

Qwen3-Coder writes calls whose values are text without quotes:

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

A value may quote such tags. Where a text can be read in two ways, these readings win:

- A function that is quoted in a value has its own end tags. A call that is left without any was cut off.
- A function ends at the last possible end before the next function begins. Three end tags in a row
  win over two, and an end at the beginning of a line wins over one inside a line. Two end tags inside
  a line count only if another call or the end of the text follows.
- A value begins where ``<parameter=KEY>`` follows ``</parameter>``. It also begins with a tag at the
  beginning of a line, if KEY is a parameter of the tool that is not given elsewhere, and if the next
  ``</parameter>`` ends the value.
"""

import ast
import contextlib
import functools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan.grpo.rollout.chat_template import ChatTemplate
from torchtitan.grpo.system import strict_json

FUNCTION = r"<function=(?P<name>[^<>\n]+)>\s*(?=<parameter=[^<>\n]+>|</(?:function|tool_call)>)"
_TAG = re.compile(
    # A function that has no values, or whose first tags are all that is quoted, is closed, too.
    rf"(?m)(?P<open>{FUNCTION})"
    r"(?P<closed></(?:function|tool_call)>(?:\s*</tool_call>)?|<[^>]+>\n(?=</parameter>))?"
    r"|(?P<value></parameter>\s*)?(?:(?P<function></function>)"
    r"(?:\s*(?P<call></tool_call>|(?:</?[a-z_]*)?\Z))?|(?P<only></tool_call>))"
    r"|(?P<split></parameter>\s*)?(?P<line>^[ \t]*)?<parameter=(?P<key>[^<>\n]+)>|</parameter>"
)
_NEXT = re.compile(r"\s*(?:<tool_call>|<function=|\Z)")
_MOST_REFERENCES = 4  # from one part of a schema to another
_TEXT = {"string", "str", "text"}
_KINDS: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def read_function(begin: re.Match[str], schemas: Mapping[str, Any]) -> tuple[str, dict, int]:
    """Returns a function's name and arguments, and where it ends. Raises ValueError if it has no end."""
    text, name, arguments = begin.string, begin["name"].strip(), {}
    tags, last = _tags_of(text, begin.end())
    properties = _get(schema := schemas.get(name), "properties")
    given = {tag["key"].strip() for tag in tags if tag is tags[0] or tag["split"]}
    stop, has_end, may_begin = last.start(), last["value"], True
    for tag in reversed(tags):  # a value ends where the next one begins
        key = (tag["key"] or "").strip()
        is_new = may_begin and tag["line"] is not None and key not in given and key not in arguments
        is_new = is_new and (not properties or _get(properties, key) is not None)
        if key and (tag is tags[0] or tag["split"] or is_new):
            value = text[tag.end() : stop].removeprefix("\n").removesuffix("\n")
            arguments.setdefault(key, _typed(value, _kinds_of(_get(properties, key), schema)))
            stop, has_end, may_begin = tag.start(), tag["split"], True
        elif not key:  # if it has no other end, then this one
            stop, has_end, may_begin = stop if has_end else tag.start(), True, not has_end
    return name, dict(reversed(arguments.items())), last.end()


def _tags_of(text: str, place: int) -> tuple[list[re.Match[str]], re.Match[str]]:
    """Returns the tags of a function's values, and the tag that ends the function."""
    tags, depth = [], 0  # depth: of functions that a value quotes
    most, count, last = 0, 0, None
    for tag in _TAG.finditer(text, place):
        num_ends = sum(map(bool, tag.group("value", "function", "call", "only")))
        if tag["open"] and last:
            break
        if tag["open"]:
            depth += not tag["closed"]
        elif depth:
            depth -= num_ends > 1
        else:
            rank = 2 * num_ends + text.startswith("\n", tag.start() - 1)
            if num_ends and not tags:
                return [], tag
            if rank >= most and (rank > 4 or (num_ends == 2 and _NEXT.match(text, tag.end()))):
                most, count, last = rank, len(tags), tag
            if tag["key"] or tag[0].startswith("</parameter>"):
                tags.append(tag)
    if last is None:
        raise ValueError("a function must have an end")
    return tags[:count], last


def _typed(value: str, kinds: set[str]) -> Any:
    """Converts a value to one of the JSON types ``kinds``, or keeps it as text if that fits best."""
    if kinds <= _TEXT:
        return value
    try:
        read = _literal(value.strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return value
    kind = _KINDS[type(read)]
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if kinds & _TEXT and (kind == "string" or not fits) else read


def _literal(text: str) -> Any:
    """Parses JSON or a Python literal. Some templates print values in the form of Python."""
    try:
        return strict_json.loads(_LITERALS.get(text.lower(), text))
    except ValueError:
        if text[:1] not in "[{(" or len(text) > 100_000:  # Python's parser takes much memory
            raise
        return strict_json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))


def _kinds_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """The JSON types that a schema allows, or an empty set if it does not name any."""
    if not isinstance(schema, dict) or depth > _MOST_REFERENCES:
        return set()
    names = schema.get("type")
    names = names if isinstance(names, list) else [names]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    found = {name for name in names if isinstance(name, str)}
    found = found or {_KINDS[type(one)] for one in (values if isinstance(values, list) else ())}
    shapes = {"items": "array", "properties": "object"}
    found = found or {shapes[key] for key in shapes if key in schema}
    parts = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    inner = [one for part in parts if isinstance(part, list) for one in part]
    if isinstance(path := schema.get("$ref"), str):
        inner.append(functools.reduce(_get, path.removeprefix("#/").split("/"), root))
    found = found.union(*(_kinds_of(one, root, depth + 1) for one in inner))
    return found | {"null"} if found and schema.get("nullable") is True else found


def _get(value: Any, key: str) -> Any:
    """Returns a part of a schema, or None if ``value`` is no object: clients may send malformed schemas."""
    return value.get(key) if isinstance(value, dict) else None


CALL_MARKS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)  # fmt: skip
"""Marks of calls. Some tokenizers have them as special tokens, which decoding would otherwise drop."""
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
    """A message that a model wrote: its tool calls, and the text without them."""

    text: str
    calls: list[ToolCall]


Parser = Callable[[str, Sequence[dict[str, Any]]], ParsedAnswer]
"""Takes what a model wrote, and the tools that it was shown."""
_Read = Callable[[re.Match[str], Sequence[dict[str, Any]]], tuple[list[ToolCall], int]]
"""Takes the match of a call's beginning; returns the calls, none if unreadable, and where they end."""


def parser_of(template: ChatTemplate) -> Parser | None:
    """Returns the parser of a template's calls, or None if it renders none or in an unknown format."""
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
    """Makes a parser of JSON calls between two patterns. ``begin`` may have groups ``name`` and ``id``."""
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
    """Parses JSON calls without end marks. They count only if they name a given tool and have arguments."""
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
    """Converts JSON to calls. Raises ValueError if one is invalid or calls a function not in ``names``."""
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
