# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads calls whose values are text without quotes, as Qwen3-Coder writes them.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

A value may contain such tags. So a tag ends it only if those behind it are as in a call.
"""

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any

from torchtitan.grpo import strict_json

# Behind a whole call, the end tag may be missing or cut where the text ends.
BEHIND_CALL = re.compile(r"\s*(?:</tool_call>|(?:</?[a-z_]*)?\Z)")
_TAG = re.compile(r"<(/?tool_call|/function|/parameter|(?:function|parameter)=([^>\n]+))>")
_SPACE = re.compile(r"\s*")
_CONTENTS = {"tool_call": ("function",), "function": ("parameter", "/function")}
_MOST_TAGS = 500  # in one value
_MOST_REFERENCES = 4  # from one part of a schema to another
_KINDS: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def read_function(
    text: str, place: int, schemas: Mapping[str, Any]
) -> tuple[str, dict[str, Any], int]:
    """Reads the name and arguments of a whole function, and where it ends; raises ValueError."""
    tag = _tag_at(text, place)
    if tag is None or _kind(tag) != "function":
        raise ValueError("there is no function")
    name, arguments = tag[2].strip(), {}
    schema, tag = schemas.get(name), _tag_at(text, tag.end())
    properties = _get(schema, "properties")
    while tag is not None and _kind(tag) == "parameter":
        key = tag[2].strip()
        end = _end_of_value(text, tag.end(), properties, {key, *arguments})
        value = text[tag.end() : end.start()].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, _kinds_of(_get(properties, key), schema))
        tag = _tag_at(text, end.end()) if _kind(end) == "/parameter" else end
    if tag is None or _kind(tag) not in ("/function", "/tool_call"):
        raise ValueError("a function must have an end")
    return name, arguments, tag.end() if _kind(tag) == "/function" else tag.start()


def _end_of_value(text: str, place: int, properties: Any, had: set[str]) -> re.Match[str]:
    """Returns the tag that ends a value, which is a later one if its own is missing."""
    depth = 0  # of calls that the value quotes
    for tag in itertools.islice(_TAG.finditer(text, place), _MOST_TAGS):
        kind, behind = _kind(tag), _tag_at(text, tag.end())
        if _kind(behind) in _CONTENTS.get(kind, ()):
            depth += 1
        elif depth:
            depth -= kind in ("/function", "/tool_call")
        elif kind == "parameter":
            key = tag[2].strip()
            if key not in had and (not properties or key in properties):
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
    if behind is None or _kind(behind) == "/function":
        return BEHIND_CALL.match(text, tag.end()) is not None
    return _kind(behind) in ("function", "tool_call") or _ends_function(text, behind)


def _tag_at(text: str, place: int) -> re.Match[str] | None:
    space = _SPACE.match(text, place)
    return _TAG.match(text, space.end()) if space else None


def _kind(tag: re.Match[str] | None) -> str:
    return tag[1].partition("=")[0] if tag else ""


def _typed(value: str, kinds: set[str]) -> Any:
    """A value of one of these types; it is text if there are none, or none fits."""
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
    names, values = schema.get("type"), schema.get("enum")
    found = {
        name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)
    }
    if not found and isinstance(values, list):
        found = {_KINDS[type(value)] for value in values}
    parts = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    inner = [one for part in parts if isinstance(part, list) for one in part]
    if isinstance(path := schema.get("$ref"), str):
        inner.append(functools.reduce(_get, path.removeprefix("#/").split("/"), root))
    return found.union(*(_kinds_of(one, root, depth + 1) for one in inner))


def _get(value: Any, key: str) -> Any:
    """A part of a schema, which a client may have sent in any form."""
    return value.get(key) if isinstance(value, dict) else None
