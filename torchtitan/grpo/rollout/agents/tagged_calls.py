# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads calls whose values are text without quotes, as Qwen3-Coder writes them.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

A value may quote such tags. Where a text can be read in two ways, these readings win:

- A function that a value quotes has its own end. If there is none left, the call was cut.
- A function ends with the last of its ends before the next one begins. Three tags come before two,
  and an end that begins a line comes before one that does not. Two tags inside a line count only
  if another call or the end of the text is behind them.
- Values are divided where ``</parameter>`` and ``<parameter=KEY>`` meet, and by a tag that begins a
  line and a parameter of the tool that is not given elsewhere, if the next ``</parameter>`` ends it.
"""

import ast
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

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
    """Reads the name and arguments of a whole function, and where it ends; raises ValueError."""
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
    """Returns the tags of a function's values, and its end."""
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
    """A value of one of these types; it is text if there are none, or none fits."""
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
    """Reads JSON, or what a template prints as Python does."""
    try:
        return strict_json.loads(_LITERALS.get(text.lower(), text))
    except ValueError:
        if text[:1] not in "[{(" or len(text) > 100_000:  # Python's parser takes much memory
            raise
        return strict_json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))


def _kinds_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """The types that a schema allows; none if it does not say."""
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
    """A part of a schema, which a client may have sent in any form."""
    return value.get(key) if isinstance(value, dict) else None
