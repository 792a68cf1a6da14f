# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads calls whose values are text without quotes, as Qwen3-Coder writes them.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

A value may contain such tags. So a tag ends it only if those behind it are as in a call.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from torchtitan.grpo import strict_json

_TAG = re.compile(r"<(/?tool_call|/function|/parameter|(?:function|parameter)=([^>\n]+))>")
_SPACE = re.compile(r"\s*")
_END = "</tool_call>"
_MOST_TAGS = 1000  # in one value
_MOST_REFERENCES = 8
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"} | {
    list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def behind_end_tag(text: str, place: int) -> int | None:
    """Returns where a text goes on behind ``</tool_call>``; None if something else is there.

    Behind a whole call, the tag may be missing or cut at the end of the text.
    """
    place = _SPACE.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
    rest = text[place : place + len(_END)]
    is_cut = place + len(rest) == len(text) and _END.startswith(rest)
    return place + len(rest) if rest == _END or is_cut else None


def read_functions(
    text: str, place: int, schemas: Mapping[str, Any], *, has_tag: bool
) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Reads the functions in one ``<tool_call>``, from a place on, and where they end.

    Raises ValueError if the first one is not whole.
    """
    calls, tag = [], _tag_at(text, place)
    while tag is not None and _kind(tag) == "function" and (has_tag or not calls):
        try:
            call, place = _function(text, tag, schemas)
        except ValueError:
            if not calls:
                raise
            break
        calls.append(call)
        tag = _tag_at(text, place)
    return calls, behind_end_tag(text, place) or place


def _function(
    text: str, begin: re.Match[str], schemas: Mapping[str, Any]
) -> tuple[tuple[str, dict[str, Any]], int]:
    name, arguments = begin[2].strip(), {}
    schema = schemas.get(name)
    properties, tag = _get(schema, "properties"), _tag_at(text, begin.end())
    while tag is not None and _kind(tag) == "parameter":
        end = _end_of_value(text, tag, arguments, properties)
        value = text[tag.end() : end.start()].removeprefix("\n").removesuffix("\n")
        key = tag[2].strip()
        arguments[key] = _typed(value, _get(properties, key), schema)
        tag = _tag_at(text, end.end()) if _kind(end) == "/parameter" else end
    if tag is None or _kind(tag) not in ("/function", "/tool_call"):
        raise ValueError("a function must have an end")
    return (name, arguments), tag.end() if _kind(tag) == "/function" else tag.start()


def _end_of_value(
    text: str, begin: re.Match[str], arguments: Mapping[str, Any], properties: Any
) -> re.Match[str]:
    """Returns the tag that ends a value, which is a later one if its own is missing."""
    depth = 0  # of functions that the value quotes
    for tag in itertools.islice(_TAG.finditer(text, begin.end()), _MOST_TAGS):
        kind, behind = _kind(tag), _tag_at(text, tag.end())
        if kind == "function" and _kind(behind) in ("parameter", "/function"):
            depth += 1
        elif depth:
            depth -= kind == "/function"
        elif kind == "parameter":
            key = tag[2].strip()
            if key not in (begin[2].strip(), *arguments) and (not properties or key in properties):
                return tag
        elif _ends_function(text, tag) or (
            kind == "/parameter" and (_kind(behind) == "parameter" or _ends_function(text, behind))
        ):
            return tag
    raise ValueError("a value must have an end")


def _ends_function(text: str, tag: re.Match[str] | None) -> bool:
    """Whether no other end follows, as it does on what a value quotes."""
    if tag is None or _kind(tag) not in ("/function", "/tool_call"):
        return False
    if _kind(tag) == "/tool_call":
        return not _kind(_TAG.search(text, tag.end())).startswith("/")
    behind = _tag_at(text, tag.end())
    if behind is None:
        return behind_end_tag(text, tag.end()) is not None
    return _kind(behind) in ("function", "tool_call") or _ends_function(text, behind)


def _tag_at(text: str, place: int) -> re.Match[str] | None:
    space = _SPACE.match(text, place)
    return _TAG.match(text, space.end()) if space else None


def _kind(tag: re.Match[str] | None) -> str:
    return tag[1].partition("=")[0] if tag else ""


def _get(value: Any, key: str) -> Any:
    """A part of a schema, which a client may have sent in any form."""
    return value.get(key) if isinstance(value, dict) else None


def _typed(value: str, schema: Any, root: Any) -> Any:
    """A value as its schema says; it is text if that says nothing else, or does not fit."""
    kinds = _kinds_of(schema, root)
    if kinds <= {"string", "str", "text"}:
        return value
    try:  # templates print literals as Python does
        read = strict_json.loads(_LITERALS.get(value.strip().lower(), value))
    except ValueError:
        return value
    kind = _KINDS[type(read)]
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if "string" in kinds and (kind == "string" or not fits) else read


def _kinds_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """The types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict) or depth > _MOST_REFERENCES:
        return set()
    declared = schema.get("type") or []
    names = [declared] if isinstance(declared, str) else _list(declared)
    found = {name for name in names if isinstance(name, str)}
    if not found:
        values = _list(schema.get("enum")) + [schema[key] for key in ("const",) if key in schema]
        found = {_KINDS[type(value)] for value in values}
    target = root if isinstance(schema.get("$ref"), str) else None
    for key in str(schema.get("$ref")).removeprefix("#/").split("/"):
        target = _get(target, key)
    inner = [
        target,
        *(one for key in ("anyOf", "oneOf", "allOf") for one in _list(schema.get(key))),
    ]
    return found.union(*(_kinds_of(one, root, depth + 1) for one in inner))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
